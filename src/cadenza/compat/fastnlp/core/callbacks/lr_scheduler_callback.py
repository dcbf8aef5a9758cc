"""Step a learning rate scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from cadenza.callbacks.learning_rate import LearningRate
from cadenza.compat.fastnlp.core.callbacks.delegating import DelegatesToNative
from cadenza.hooks import moments
from cadenza.hooks.listener import Listener
from cadenza.hooks.schedule import Every

if TYPE_CHECKING:
    from cadenza.run import Run


class LRSchedCallback(DelegatesToNative):
    """Step a scheduler after each update, or after each epoch. A checkpoint holds its state.

    Args:
        scheduler: A torch scheduler of one of the optimizers, which the native `LearningRate` steps; or any object with a
            method ``step``.
        step_on: ``"batch"``: after each update, once per ``accumulation_steps`` batches. Otherwise after each epoch.

    Raises:
        AssertionError: `scheduler` has no method ``step``.
        ValueError: The scheduler belongs to another optimizer, or needs a result, like ``ReduceLROnPlateau``.
    """

    def __init__(self, scheduler: Any, step_on: str = "batch") -> None:
        if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
            raise AssertionError(f"a scheduler must be an object with a method step(); got {scheduler!r}")
        self.scheduler: Any = scheduler
        self.step_on: str = step_on
        if isinstance(scheduler, LRScheduler):
            self.native: LearningRate | _Stepping = LearningRate(scheduler, every="1 step" if step_on == "batch" else "1 epoch")
        else:
            self.native = _Stepping(scheduler, each_batch=step_on == "batch")


class _Stepping(moments.Callback):
    """Steps an object that is not a scheduler of torch."""

    def __init__(self, scheduler: Any, *, each_batch: bool) -> None:
        self.scheduler: Any = scheduler
        self.each_batch: bool = each_batch

    def listeners(self) -> list[Listener]:
        if self.each_batch:
            return [Listener(moments.Callback.on_after_optimizer_step, self._step)]
        return [Listener(moments.Callback.on_epoch_end, self._step, Every("1 epoch"))]

    def _step(self, run: Run) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()} if hasattr(self.scheduler, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
