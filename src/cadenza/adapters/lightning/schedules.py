"""The schedules of a run as Lightning describes them: when it validates, and how the learning rate changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from cadenza.adapters.lightning.library import imported
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.learning_rate import LearningRate
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.schedule import Every

if TYPE_CHECKING:
    from cadenza.run import Run


def scheduler_configs(run: Run) -> list[Any]:
    """Return each scheduler of `LearningRate` as Lightning's ``LRSchedulerConfig``."""
    config = imported("utilities.types", "LRSchedulerConfig")
    return [
        config(
            scheduler=one.scheduler,
            interval=one.per,
            reduce_on_plateau=isinstance(one.scheduler, ReduceLROnPlateau),
            monitor=None if one.monitor is None else one.monitor.name,
        )
        for one in hooks_of(run).callbacks.values()
        if isinstance(one, LearningRate) and one.scheduler is not None
    ]


def validation_interval(run: Run) -> tuple[int | float, int | None]:
    """Return ``val_check_interval`` and ``check_val_every_n_epoch`` of the first `Evaluate` in the list.

    The second one is None unless it evaluates at the end of epochs. Without `Evaluate`: 1.0 and 1, as by default.
    """
    found = [one for one in hooks_of(run).callbacks.values() if isinstance(one, Evaluate)]
    if not found:
        return 1.0, 1
    every = found[0].every
    if every.only_epochs and isinstance(every, Every):
        return 1.0, int(every.count)
    if isinstance(every, Every) and every.unit == "step":
        return int(every.count) * session_of(run).step.window.size, None
    if isinstance(every, Every) and every.unit == "batch":
        return int(every.count), None
    if isinstance(every, Every) and every.unit == "epoch":
        return float(every.count), 1
    return 1.0, None
