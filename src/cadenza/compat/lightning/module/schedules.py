"""The learning rate schedules of a LightningModule, stepped at the same points as in Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.callbacks.learning_rate import with_kinds
from cadenza.compat.adapter.view import Weak
from cadenza.compat.lightning.conductor import Conductor
from cadenza.compat.lightning.trainer_view import trainer_view
from cadenza.errors import MonitorError
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.compat.lightning.module.parts import ScheduleConfig
    from cadenza.run import Run


class ModuleSchedules(BaseCallback):
    """Step the schedulers of ``configure_optimizers``, in automatic optimization, and save them.

    A scheduler of interval ``"step"`` is stepped after each update, one of interval ``"epoch"`` after the last update of an
    epoch, before an evaluation.
    """

    phase: Phase | None = Phase.SCHEDULE
    attached: Weak[Attached] = Weak()

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self.name: str | None = "LightningModule schedules"
        self._epochs = 0  # for which the schedulers of interval "epoch" were stepped

    def __repr__(self) -> str:
        return f"schedules of {type(self.attached.module).__name__}"

    def listeners(self) -> list[Listener]:
        if not self.attached.automatic:
            return []
        return [Listener(Callback.on_step_end, self._step_end), Listener(Callback.on_epoch_end, self._epoch_end)]

    def plateau_listeners(self) -> list[Listener]:
        """Return the listeners for the schedulers that need a logged value. They run after all other hooks of the module."""
        if not self.attached.automatic:
            return []
        listeners = [Listener(Callback.on_step_end, self._plateau_step), Listener(Callback.on_epoch_end, self._plateau_epoch)]
        self.attached.show_plateaus(listeners)
        return listeners

    def _plateau_step(self, run: Run) -> None:
        if unwinding(run) is None:
            self.update(run, "step", self.attached.batch_idx, plateau=True)

    def _plateau_epoch(self, run: Run) -> None:
        if unwinding(run) is None and not run.progress.batch_in_epoch:
            self.update(run, "epoch", run.progress.epoch, plateau=True)

    def _step_end(self, run: Run) -> None:
        if unwinding(run) is None:
            self.update(run, "step", self.attached.batch_idx, plateau=False)
            if self.attached.last_batch:
                self._end_of_epoch(run, run.progress.epoch + 1)

    def _epoch_end(self, run: Run) -> None:
        """Step the schedulers if the loader has no length, since the last step could not detect the end of the epoch."""
        if unwinding(run) is None and run.progress.epoch > self._epochs:
            self._end_of_epoch(run, run.progress.epoch)

    def _end_of_epoch(self, run: Run, epoch: int) -> None:
        self._epochs = epoch
        self.update(run, "epoch", epoch, plateau=False)

    def update(self, run: Run, interval: str, count: int, *, plateau: bool) -> None:
        """Step the schedulers of one interval that are due after `count` of them."""
        for config in self.attached.schedules:
            if config.interval == interval and config.reduce_on_plateau == plateau and count % config.frequency == 0:
                self._step(run, config)

    def _step(self, run: Run, config: ScheduleConfig) -> None:
        value = None
        if config.reduce_on_plateau:
            known = trainer_view(run).callback_metrics
            value = known.get(str(config.monitor))
            if value is None and config.strict:
                raise MonitorError(
                    f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. Available metrics are: "
                    f"{sorted(known)}. Condition can be set using `monitor` key in lr scheduler dict"
                )
            if value is None:
                run.warn(f"ReduceLROnPlateau needs {config.monitor!r}, which is not logged: the learning rate stays")
                return
        self.attached.call("lr_scheduler_step", config.scheduler, value)

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [config.scheduler.state_dict() for config in self.attached.configured], "epochs": self._epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epochs = state["epochs"]
        for config, saved in zip(self.attached.configured, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(with_kinds(saved, config.scheduler.state_dict()))


class PlateauSchedules(BaseCallback):
    """Step the schedulers that need a logged value, after all hooks of the module."""

    after: Relation = (Conductor, Phase.EVALUATE)

    def __init__(self, schedules: ModuleSchedules) -> None:
        self._schedules = schedules
        self.name: str | None = "LightningModule plateau schedules"

    def listeners(self) -> list[Listener]:
        return self._schedules.plateau_listeners()
