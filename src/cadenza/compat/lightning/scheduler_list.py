"""``trainer.lr_scheduler_configs``: a list that callbacks may change, such as ``StochasticWeightAveraging``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from cadenza.callbacks.learning_rate import LearningRate
from cadenza.compat.adapter.view import OfRun
from cadenza.compat.lightning.library import imported
from cadenza.hooks.dispatch import hooks_of
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.run import Run


class SchedulerList(list[Any]):
    """The schedulers of a run as Lightning's ``LRSchedulerConfig``.

    `LearningRate` steps its scheduler as long as its entry is in the list. Entries added by callbacks are stepped here at the
    end of epochs.

    Args:
        run: The run, with its schedulers.
    """

    def __init__(self, run: Run) -> None:
        self._of_run = OfRun(run)
        self._native: dict[str, tuple[Any, LearningRate]] = {}
        config = imported("utilities.types", "LRSchedulerConfig")
        for name, callback in hooks_of(run).callbacks.items():
            if isinstance(callback, LearningRate) and callback.scheduler is not None:
                plateau = isinstance(callback.scheduler, ReduceLROnPlateau)
                monitor = None if callback.monitor is None else callback.monitor.name
                entry = config(callback.scheduler, interval=callback.unit, reduce_on_plateau=plateau, monitor=monitor)
                self._native[name] = entry, callback
        super().__init__(entry for entry, _ in self._native.values())

    def refreshed(self) -> SchedulerList:
        """Return the list with the current scheduler of each `LearningRate`, which may have been recreated."""
        for entry, native in self._native.values():
            entry.scheduler = native.scheduler
        return self

    def drop_replaced(self) -> None:
        """Stop each `LearningRate` that a callback removed from the list. Every rank must call this."""
        present = {id(entry) for entry in self}
        for name, (entry, _) in list(self._native.items()):
            if id(entry) not in present:
                del self._native[name]
                for listeners in hooks_of(self._of_run.run).by_moment.values():
                    for listener in listeners:
                        if listener.owner == name:
                            listener.disable()
                decide(self._of_run.run, "schedule replaced", f"that of {name}", data={"callback": name})

    def step(self, epoch: int) -> None:
        """Step the schedulers added by callbacks, after the epoch with this index."""
        native = {id(entry) for entry, _ in self._native.values()}
        for entry in self:
            if id(entry) not in native and entry.interval == "epoch" and (epoch + 1) % entry.frequency == 0:
                entry.scheduler.step()
