"""``training_step`` as the loss of a native loop: automatic optimization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cadenza.compat.lightning.module.run_trainer import attach
from cadenza.errors import AdapterError, LossError
from cadenza.status.reprs import signature_of

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.run import Run

_COUNTS = ("weight", "samples", "tokens")
"""Outputs that are meaningful only in a native loop."""


class TrainingStep:
    """The trainer's ``compute_loss``: call ``training_step``."""

    has_effects = True  # it logs and updates metrics, so `ReplayCheck` must not call it twice for a batch

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._takes_index = takes_index(attached.module)

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        attached = self._attached
        output = attached.output = self.run(model, batch)
        if output is None:
            if attached.driver.world_size > 1:
                raise RuntimeError(
                    "Skipping the `training_step` by returning None in distributed training is not supported, as the ranks "
                    "would wait for each other. Return a loss of 0 times the outputs on this rank."
                )
            return {"loss": torch.zeros((), device=attached.driver.device)}  # dropped in on_before_backward
        if isinstance(output, Tensor):
            return {"loss": output}
        if isinstance(output, Mapping) and output.get("loss") is not None:
            return {name: value for name, value in output.items() if name not in _COUNTS}
        came = f"a mapping with {sorted(output)}" if isinstance(output, Mapping) else repr(type(output).__name__)
        raise LossError(
            "In automatic optimization, `training_step` must return a Tensor, a dict with the key 'loss', or None (the step is "
            f"skipped); got {came}."
        )

    @contextmanager
    def outside_fit(self, run: Run) -> Iterator[None]:
        """Allow calls of the module outside a fit: set a trainer with the counters of `run`, and discard logged values."""
        log = self._attached.log
        attach(self._attached, run)
        log.begin()
        with log.muted():
            yield

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        """Allow repeated calls of the module for counted batches: discard logged values, including those in metrics."""
        attached = self._attached
        output = attached.output
        with attached.log.muted():
            yield
        attached.output = output

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Return the result of ``training_step``. A wrapped model is called as a whole, so that gradients are reduced."""
        attached = self._attached
        arguments = (batch, attached.batch_idx - attached.again) if self._takes_index else (batch,)
        if attached.driver.world_size == 1 or not attached.automatic:
            return attached.call("training_step", *arguments)
        return redirected(attached, "training_step", model, arguments)

    def __repr__(self) -> str:
        return f"{type(self._attached.module).__name__}.training_step"


def redirected(attached: Attached, name: str, model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """Call a wrapped model, which calls a step of the module instead of ``forward``.

    Args:
        attached: The LightningModule.
        name: The step, such as ``"training_step"``.
        model: The model of the run.
        arguments: The arguments of the step.
    """
    module = attached.module
    own = vars(module).get("forward")

    def instead(*given: Any) -> Any:
        restore()
        return attached.call(name, *given)

    def restore() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own

    module.forward = instead
    try:
        return model(*arguments)
    finally:
        restore()


def takes_index(module: Any) -> bool:
    """Return whether ``training_step`` takes the index of the batch.

    Raises:
        AdapterError: It takes ``dataloader_iter`` or ``optimizer_idx``, which a native loop does not provide.
    """
    parameters = signature_of(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise AdapterError(
            f"{type(module).__name__}.training_step takes dataloader_iter, the iterator of the loader. A native loop reads the "
            "loader itself, so that a run can resume inside an epoch. Take (batch, batch_idx)."
        )
    if "optimizer_idx" in parameters:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx` "
            "argument from `training_step`, set `self.automatic_optimization = False` and access your optimizers in "
            "`training_step` with `opt1, opt2, ... = self.optimizers()`."
        )
    names = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    positional = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    return "batch_idx" in parameters or len(names) > 1 or positional
