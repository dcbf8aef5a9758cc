"""The methods of a trainer that a subclass may override, and their defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.compat.accelerated.data import inputs_and_targets
from cadenza.compat.accelerated.placeholders import replace_trainer_placeholder_values
from cadenza.compat.accelerated.train_epoch import run_train_epoch
from cadenza.compat.accelerated.trainer_api import TrainerApi
from cadenza.compat.accelerated.utils import worker_init_fn


def overrides(trainer: Overridable, method: Callable[..., Any]) -> bool:
    """Return whether a trainer overrides this method of `Overridable`."""
    return getattr(getattr(trainer, method.__name__), "__func__", None) is not method


class Overridable(TrainerApi):
    """The steps of a run as small methods; see `Trainer`."""

    create_scheduler_fn: Callable[[Optimizer], Any] | None
    train_dataset: Any
    eval_dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    _train_dl_kwargs: dict[str, Any] | None
    _eval_dl_kwargs: dict[str, Any] | None
    _items_factor = 1
    """`_loss_factor` of the current batch."""

    # -- to override: setup --------------------------------------------------------------------------

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the training loader."""
        return {**self.get_default_eval_dl_kwargs(batch_size), "shuffle": True}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the evaluation loader."""
        gpus = torch.cuda.device_count()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(cores // max(gpus, 1), 1)
        return {
            "shuffle": False,
            "pin_memory": gpus > 0,
            "batch_size": batch_size,
            "num_workers": workers,
            "worker_init_fn": worker_init_fn,
        }

    def create_scheduler(self) -> Any:
        """Return the scheduler. Called if there is a ``create_scheduler_fn``."""
        assert self.create_scheduler_fn is not None, "called only if there is one"
        scheduler = replace_trainer_placeholder_values(self, self.create_scheduler_fn)(self.optimizer)
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
        """Return ``loss`` and ``batch_size`` of a batch. Callbacks get these and all other entries, here ``model_outputs``.

        With an entry ``num_items_in_batch``, the loss is a mean over the items of all processes: on several processes, and
        with accumulation, `backward_step` gets it times the number of processes.
        """
        inputs, targets = inputs_and_targets(batch)
        outputs = self.model(inputs)
        assert self.loss_func is not None, "a trainer without loss_func overrides this method"
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs, "batch_size": targets.size(0)}

    def backward_step(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, which is scaled for the accumulation window."""
        self._accelerator.backward(loss)

    def _clip_gradients(self) -> None:
        """Called before each update if there is a ``gradient_clip_value``."""
        assert self.run_config is not None, "a run is in progress"
        assert self.native_run is not None, "a run is in progress"
        ClipGradients(max_value=self.run_config.gradient_clip_value).on_before_optimizer_step(self.native_run)

    def optimizer_step(self) -> None:
        """Update the weights."""
        self._accelerator.optimizer_step_was_skipped = bool(self._accelerator.precision.step([self.optimizer]))

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
        """Return ``loss`` and ``batch_size`` of an evaluation batch, and more entries for callbacks, without gradient."""
        with torch.no_grad():
            return Overridable.calculate_train_batch_loss(self, batch)

    def eval_epoch_end(self) -> None:
        """Called after an evaluation."""

    # -- private in the original, overridden by its users: an epoch and a batch --------------------------------

    def _run_train_epoch(self, train_dl: Iterable[Any]) -> bool:
        """Train for an epoch. Return whether the limit of steps is reached. Every process must call this.

        An override must call this method once: the native loop runs the steps here. It calls `train_epoch_start` and
        ``on_train_epoch_start`` before, and `train_epoch_end` and ``on_train_epoch_end`` after them.

        Args:
            train_dl: The trainer's ``_train_dataloader``. To change it, set this attribute before the epoch.

        Raises:
            RuntimeError: No training is in progress, or the steps of this epoch have already run.
            ValueError: `train_dl` is another loader.
            StopTrainingError: The training was stopped. The trainer expects it.
        """
        return run_train_epoch(self, train_dl, self.train_epoch_start, self.train_epoch_end)

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute the loss of a batch, call ``on_train_step_end``, and add the gradients.

        If a subclass overrides it, the native loop calls it for each batch. Otherwise the native loop performs them.

        Args:
            batch: On the device.
            step: The index of the batch in its epoch, from 0.
        """
        output = self.calculate_train_batch_loss(batch)
        self._update_loss_tracker(output["loss"], output["batch_size"])
        self.callback_handler.call_event("on_train_step_end", self, batch_output=output, batch=batch, step=step)
        assert self.run_config is not None, "created by train"
        self.backward_step(output["loss"] * self._loss_factor(output) / self.run_config.gradient_accumulation_steps)

    def _loss_factor(self, output: Mapping[str, Any]) -> int:
        """Return the factor that turns the mean of gradients over processes into a sum, if the loss of a batch needs it."""
        config = self.run_config
        if config is None or "num_items_in_batch" not in output or config.gradient_accumulation_steps == 1:
            return 1
        return config.num_processes if config.is_distributed else 1

    # -- to override: the end of a run -----------------------------------------------------------------------------

    def training_run_epoch_end(self) -> None:
        """Called at the end of an epoch, after its evaluation."""

    def training_run_end(self) -> None:
        """Called at the end of the training; sets `model` to the user's own module."""
        self.model: torch.nn.Module = self.get_model()

    def evaluation_run_start(self) -> None:
        """Called before an evaluation outside of a training."""

    def evaluation_run_end(self) -> None:
        """Called after an evaluation outside of a training; sets `model` to the user's own module."""
        self.model = self.get_model()
