"""Manual optimization: ``training_step`` as the ``step_fn`` of a native loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.compat.lightning.module.training import TrainingStep
    from cadenza.run import Run


class ManualStep:
    """The trainer's ``step_fn``: call ``training_step``, which performs backward passes and updates."""

    def __init__(self, attached: Attached, step: TrainingStep) -> None:
        self._attached, self._step = attached, step

    def __call__(self, run: Run, batch: Any) -> dict[str, Any]:
        self._attached.backward_losses = []
        output = self._attached.output = self._step.run(run.model, batch)
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        if isinstance(output, Mapping):
            parts = {name: value.detach() if isinstance(value, Tensor) else value for name, value in output.items()}
            return {"loss": self._loss(), **parts}
        if output is None:
            return {"loss": self._loss()}
        raise TypeError(
            "In manual optimization, `training_step` must either return a Tensor, a dict or None; got "
            f"{type(output).__name__!r}."
        )

    def _loss(self) -> Tensor:
        """Return the sum of the losses of ``manual_backward``, for a ``training_step`` that returns none."""
        losses = self._attached.backward_losses
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._attached.driver.device)

    def __repr__(self) -> str:
        return repr(self._step)
