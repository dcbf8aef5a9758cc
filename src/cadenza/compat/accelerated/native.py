"""The ``trainer`` of callbacks in a native run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cadenza.callbacks.learning_rate import LearningRate
from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.events import AcceleratedCallback
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker
from cadenza.compat.accelerated.trainer_api import TrainerApi
from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.adapter.view import OfRun
from cadenza.engine.session import session_of
from cadenza.run import Run


class NativeRunView(TrainerApi):
    """A view of a native run without hooks to override. Attributes that a callback sets on it are visible to the others."""

    def __init__(self, run: Run) -> None:
        self._of_run = OfRun(run)
        session = session_of(run)
        self.model: nn.Module = session.model
        self.loss_func: Any = None
        if run.optimizers:
            self.optimizer: torch.optim.Optimizer = run.optimizers[0]
        self.run_history: InMemoryRunHistory = InMemoryRunHistory()
        self.callback_handler: CallbackHandler = CallbackHandler(())
        # not through the constructor: a native list may hold several callbacks of one class
        self.callback_handler.callbacks += callbacks_of(run, AcceleratedCallback)
        self._accelerator = Accelerator(run.driver)
        self._loss_tracker = LossTracker()

    @property
    def native_run(self) -> Run:  # type: ignore[override]  # as below
        """The native run."""
        return self._of_run.run

    @property
    def scheduler(self) -> Any:
        """The scheduler of the first `LearningRate` in the list; None if there is none."""
        return next((callback.scheduler for callback in callbacks_of(self.native_run, LearningRate)), None)

    @property
    def _train_dataloader(self) -> Any:  # type: ignore[override]  # an attribute in the base class is a property here
        return self.native_run.loader

    @property
    def _eval_dataloader(self) -> Any:  # type: ignore[override]  # as above
        """The loader of the first evaluation; None if there is none."""
        return next((evaluation.loader for evaluation in self.native_run.evaluations.values()), None)

    @property
    def run_config(self) -> TrainerRunConfig:  # type: ignore[override]  # as above
        """The settings of the run with the names of pytorch-accelerated."""
        run, driver = self.native_run, self.native_run.driver
        batches, limits = self._batches_of_each(run.loader), run.progress
        updates = None if batches is None else -(-batches // run.info.accumulate)
        train_size = getattr(run.loader, "batch_size", None)
        eval_size = getattr(self._eval_dataloader, "batch_size", train_size)
        return TrainerRunConfig(
            num_epochs=limits.max_epochs,
            train_per_device_batch_size=train_size,
            train_dl_kwargs=None,
            eval_per_device_batch_size=eval_size,
            eval_dl_kwargs=None,
            gradient_accumulation_steps=run.info.accumulate,
            gradient_clip_value=None,
            train_total_batch_size=None if train_size is None else train_size * driver.data_world_size * run.info.accumulate,
            eval_total_batch_size=None if eval_size is None else eval_size * driver.data_world_size,
            num_update_steps_per_epoch=updates,
            num_local_update_steps_per_epoch=updates,
            max_num_train_steps=limits.total("step", run.info.accumulate),
            is_local_process_zero=driver.local_rank == 0,
            is_world_process_zero=driver.is_main,
            is_distributed=driver.world_size > 1,
            mixed_precision={"fp32": "no"}.get(session_of(run).precision.name, session_of(run).precision.name),
            num_processes=driver.world_size,
        )
