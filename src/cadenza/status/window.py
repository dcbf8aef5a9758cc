"""The batches of a step, as hooks see them: ``run.window``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The batches of the current step, or of the last one, and what its update changes. Read-only.

    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_batch_end)
    ... def show(run, batch, outputs):
    ...     print(run.window.seen, run.window.size, run.window.loss_scale, len(run.window.parameters))
    >>> run = tiny_run(steps=1, accumulate=2, callbacks=[show])
    1 2 0.5 2
    2 2 0.5 2
    """

    seen: int
    """The batches of the step so far."""
    size: int
    """The batches of a whole step."""
    weights: Sequence[float | Tensor]
    """The weights of the batches so far; empty if they have none."""
    loss_scale: float | Tensor
    """The factor on the loss of the last batch in its backward pass, without that of fp16."""
    optimizers: Sequence[Optimizer]
    """The optimizers that the step updates: one update of a ``step_fn`` or of an attached loop may have some of them."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that the step updates."""
        return [one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]]
