"""The methods of a trainer that a subclass may override, and their defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.compat.accelerated.data import inputs_and_targets, kwargs_for, loader_of
from cadenza.compat.accelerated.face import TrainerFace
from cadenza.compat.accelerated.placeholders import resolve
from cadenza.loading.loaders import length_of
from cadenza.optim.precision import Precision


class Overridable(TrainerFace):
    """The steps of a run as small methods; see `Trainer`."""

    create_scheduler_fn: Callable[[Optimizer], Any] | None
    train_dataset: Any
    eval_dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    _train_dl_kwargs: dict[str, Any] | None
    _eval_dl_kwargs: dict[str, Any] | None
    _precision: Precision
    _updated: bool

    # -- to override: setting up --------------------------------------------------------------------------

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of `train_dataset`."""
        kwargs = kwargs_for(self.get_default_train_dl_kwargs(batch_size), train_dl_kwargs)
        self._train_dl_kwargs = kwargs
        return loader_of(self.train_dataset, kwargs, self.collate_fn)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Mapping[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of `eval_dataset`."""
        kwargs = kwargs_for(self.get_default_eval_dl_kwargs(batch_size), eval_dl_kwargs)
        self._eval_dl_kwargs = kwargs
        return loader_of(self.eval_dataset, kwargs, self.collate_fn)

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the training loader."""
        return {**self.get_default_eval_dl_kwargs(batch_size), "shuffle": True}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the evaluation loader."""
        gpus = torch.cuda.device_count()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(cores // max(gpus, 1), 1)
        return {"shuffle": False, "pin_memory": gpus > 0, "batch_size": batch_size, "num_workers": workers}

    def create_scheduler(self) -> Any:
        """Return the scheduler. Called if there is a ``create_scheduler_fn``."""
        config = self.run_config
        assert self.create_scheduler_fn is not None, "called only if there is one"
        assert config is not None, "created before"
        eval_length = length_of(self._eval_dataloader)
        values = {
            "NUM_EPOCHS": config.num_epochs,
            "NUM_UPDATE_STEPS_PER_EPOCH": config.num_update_steps_per_epoch,
            "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH": config.num_local_update_steps_per_epoch,
            "TRAIN_DATALOADER_LEN": self._batches_of_each(self._train_dataloader),
            "EVAL_DATALOADER_LEN": None if eval_length is None else -(-eval_length // config.num_processes),
        }
        scheduler = resolve(self.create_scheduler_fn, values)(self.optimizer)
        if scheduler is None:
            raise TypeError("create_scheduler_fn must return a scheduler; got None. Add the return statement")
        return scheduler

    # -- to override: the steps of a run --------------------------------------------------------------------

    def training_run_start(self) -> None:
        """Called before the first epoch."""

    def train_epoch_start(self) -> None:
        """Called before an epoch; puts the model in training mode."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return ``loss``, ``model_outputs`` and ``batch_size`` of a batch; more entries reach ``on_train_step_end``."""
        inputs, targets = inputs_and_targets(batch)
        outputs = self.model(inputs)
        assert self.loss_func is not None, "a trainer without loss_func overrides this method"
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs, "batch_size": targets.size(0)}

    def backward_step(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, which is scaled for the accumulation window."""
        self._precision.backward(loss)

    def _clip_gradients(self) -> None:
        """Called before each update if there is a ``gradient_clip_value``."""
        assert self.run_config is not None, "a run is in progress"
        assert self.native_run is not None, "a run is in progress"
        ClipGradients(max_value=self.run_config.gradient_clip_value).on_before_optimizer_step(self.native_run)

    def optimizer_step(self) -> None:
        """Update the weights."""
        self._updated = not self._precision.step([self.optimizer])

    def scheduler_step(self) -> None:
        """Called after each update, if there is a scheduler."""
        self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients after an update."""
        self.optimizer.zero_grad()

    def train_epoch_end(self) -> None:
        """Called after the last step of an epoch."""

    def eval_epoch_start(self) -> None:
        """Called before an evaluation; puts the model in evaluation mode. The previous mode is restored afterwards."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return ``loss``, ``model_outputs`` and ``batch_size`` of an evaluation batch, without gradient."""
        with torch.no_grad():
            return Overridable.calculate_train_batch_loss(self, batch)

    def eval_epoch_end(self) -> None:
        """Called after an evaluation."""

    def training_run_epoch_end(self) -> None:
        """Called at the end of an epoch, after its evaluation."""

    def training_run_end(self) -> None:
        """Called at the end of the training; sets `model` to the user's own module."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Called before an evaluation outside of a training."""

    def evaluation_run_end(self) -> None:
        """Called after an evaluation outside of a training; sets `model` to the user's own module."""
        self.model = self.get_model()
