"""``nemo.core.callbacks`` of NeMo 0.10: six events without arguments."""

from __future__ import annotations

from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.checkpointing import CheckpointFiles
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback, WandbCallback
from cadenza.compat.neural.module_callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback

__all__ = [
    "ActionCallback",
    "CheckpointCallback",
    "EvaluatorCallback",
    "ModuleSaverCallback",
    "SimpleLossLoggerCallback",
    "UnfreezeCallback",
    "ValueSetterCallback",
    "WandbCallback",
    "logging",
]


class CheckpointCallback(CheckpointFiles, ActionCallback):
    """Write NeMo 0.10's checkpoint files, and restore the newest at the start; for the arguments see `CheckpointFiles`."""

    _epoch_key, _strict = "epoch_num", False

    def on_action_start(self) -> None:
        self._files.restore(self.action.run)

    def on_iteration_end(self) -> None:
        self._files.save_step(self.action.run, self.step, self.epoch_num)

    def on_epoch_end(self) -> None:
        epoch, every = self.epoch_num, self._files.epoch_freq
        if every > 0 and (epoch + 1) % every == 0:
            self._files.save(self.action.run, "EPOCH", epoch, self.step, epoch)

    def on_action_end(self) -> None:
        self._files.save_last(self.action.run, self.step, self.epoch_num)
