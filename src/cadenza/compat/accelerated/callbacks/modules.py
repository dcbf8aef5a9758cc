"""Modules other than the model, and batch normalization over all processes."""

from __future__ import annotations

from typing import Any

from torch import nn

from cadenza.callbacks.sync_batch_norm import ConvertSyncBatchNorm
from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.hooks.listener import Listener


class MoveModulesToDeviceCallback(TrainerCallback):
    """Move every module that is an attribute of the trainer to its device when a run starts. The trainer moves the model."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self._move_modules_to_device(trainer)

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self._move_modules_to_device(trainer)

    def _get_modules(self, trainer: Any) -> list[tuple[str, nn.Module]]:
        """Return the modules that are attributes of the trainer, with their names."""
        return [(name, value) for name, value in vars(trainer).items() if isinstance(value, nn.Module)]

    def _move_modules_to_device(self, trainer: Any) -> None:
        for name, module in self._get_modules(trainer):
            if name != "model":
                module.to(trainer.device)


class ConvertSyncBatchNormCallback(TrainerCallback):
    """On several processes, replace BatchNorm layers by ``torch.nn.SyncBatchNorm``, with the native `ConvertSyncBatchNorm`."""

    def __init__(self) -> None:
        self._convert = ConvertSyncBatchNorm()

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), *self._convert.listeners()]
