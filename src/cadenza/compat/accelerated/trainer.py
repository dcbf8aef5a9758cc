"""``pytorch_accelerated.trainer``: a trainer whose parts are methods to override."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from cadenza.batching import length_of
from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.compat.accelerated.callbacks import (
    LimitBatchesCallback,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    TerminateOnNaNCallback,
)
from cadenza.compat.accelerated.data import check_uneven, kwargs_for, loader_of
from cadenza.compat.accelerated.events import Left, StopTrainingError
from cadenza.compat.accelerated.face import Accelerator, EvalEpoch, TrainerFace, state_in
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.placeholders import TrainerPlaceholderValues, resolve
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.stage import Back, Front
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker, RunHistory
from cadenza.compat.accelerated.utils import batches_limit
from cadenza.drivers import driver_of
from cadenza.evaluation import evaluate
from cadenza.moments import BaseCallback
from cadenza.precision import Precision
from cadenza.run import Run
from cadenza.trainer import Trainer as NativeTrainer

if TYPE_CHECKING:
    from cadenza.drivers import Driver

__all__ = ["DEFAULT_CALLBACKS", "StopTrainingError", "Trainer", "TrainerPlaceholderValues", "TrainerWithTimmScheduler"]

Callbacks = Iterable[BaseCallback | type[BaseCallback]]


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[BaseCallback], ...]:
    """Return the classes that a trainer has if nothing else is said."""
    bar = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback, *bar, LogMetricsCallback)


DEFAULT_CALLBACKS = get_default_callbacks()


class Trainer(TrainerFace):
    """Train and evaluate a model; every part of it is a method that a subclass may override.

    It is a translation: `train` makes a native ``Trainer`` and lets it run; `native_run` is the run. A hook such as
    `train_epoch_start` is called before the callbacks' event of the same name.

    Args:
        model: An ``nn.Module``.
        loss_func: Called as ``loss_func(model_outputs, targets)``.
        optimizer: Holds parameters of the model.
        callbacks: Instances, or classes that need no arguments; native ones may be among them. ``()`` for none at all.
        run_history: Where metrics are kept; None: in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: Optimizer,
        callbacks: Callbacks = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
    ) -> None:
        self.model, self.loss_func, self.optimizer = model, loss_func, optimizer
        self.callback_handler = self._create_callback_handler(callbacks)
        self.run_history = InMemoryRunHistory() if run_history is None else run_history
        self._accelerator = self._create_accelerator()
        self._loss_tracker = LossTracker()
        self.scheduler: Any = None
        self.create_scheduler_fn: Callable[[Optimizer], Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.run_config: TrainerRunConfig | None = None
        self.native_run: Run | None = None
        self._train_dataloader = self._eval_dataloader = None
        self._train_dl_kwargs: dict[str, Any] | None = None
        self._eval_dl_kwargs: dict[str, Any] | None = None
        self._asked_batch_size = 8
        self._precision = Precision()
        self._updated = True
        self.callback_handler.call_event("on_init_end", self)

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
        """Return what the training loader is made with, unless something else is asked for."""
        return {**self.get_default_eval_dl_kwargs(batch_size), "shuffle": True}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return what the loader of an evaluation is made with, unless something else is asked for."""
        gpus = torch.cuda.device_count()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(cores // max(gpus, 1), 1)
        return {"shuffle": False, "pin_memory": gpus > 0, "batch_size": batch_size, "num_workers": workers}

    def create_scheduler(self) -> Any:
        """Return the scheduler of a training that has a ``create_scheduler_fn``."""
        config = self.run_config
        assert self.create_scheduler_fn is not None, "it is called only if there is one"
        assert config is not None, "it is made before"
        values = {
            "NUM_EPOCHS": config.num_epochs,
            "NUM_UPDATE_STEPS_PER_EPOCH": config.num_update_steps_per_epoch,
            "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH": config.num_local_update_steps_per_epoch,
            "TRAIN_DATALOADER_LEN": length_of(self._train_dataloader),
            "EVAL_DATALOADER_LEN": length_of(self._eval_dataloader),
        }
        return resolve(self.create_scheduler_fn, values)(self.optimizer)

    # -- to override: the course of a run -------------------------------------------------------------------

    def training_run_start(self) -> None:
        """Called before the first epoch."""

    def train_epoch_start(self) -> None:
        """Called before an epoch; puts the model in training mode."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return ``loss``, ``model_outputs`` and ``batch_size`` of a batch; more entries reach ``on_train_step_end``."""
        inputs, targets = batch[0], batch[1]
        outputs = self.model(inputs)
        assert self.loss_func is not None, "a trainer without loss_func overrides this"
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs, "batch_size": targets.size(0)}

    def backward_step(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a batch's share of the step's."""
        self._precision.backward(loss)

    def optimizer_step(self) -> None:
        """Update the weights."""
        self._updated = self._precision.step([self.optimizer])

    def scheduler_step(self) -> None:
        """Called after each update, if there is a scheduler."""
        self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients, after an update."""
        self.optimizer.zero_grad()

    def train_epoch_end(self) -> None:
        """Called after the last step of an epoch."""

    def eval_epoch_start(self) -> None:
        """Called before an evaluation; puts the model in evaluation mode. Afterwards it is in the one it had."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return ``loss``, ``model_outputs`` and ``batch_size`` of a batch of an evaluation, without gradient."""
        with torch.no_grad():
            return Trainer.calculate_train_batch_loss(self, batch)

    def eval_epoch_end(self) -> None:
        """Called after an evaluation."""

    def training_run_epoch_end(self) -> None:
        """Called when an epoch and its evaluation are over."""

    def training_run_end(self) -> None:
        """Called when the training is over; `model` is then the user's own module."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Called before an evaluation that is no part of a training."""

    def evaluation_run_end(self) -> None:
        """Called after an evaluation that is no part of a training; `model` is then the user's own module."""
        self.model = self.get_model()

    # -- training and evaluation ---------------------------------------------------------------------------

    def train(
        self,
        train_dataset: Any,
        num_epochs: int,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[[Optimizer], Any] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        eval_dataloader_kwargs: Mapping[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train. Every process must call this.

        Args:
            train_dataset: What `create_train_dataloader` makes a loader of.
            num_epochs: How many epochs.
            eval_dataset: Evaluated after each epoch, if given.
            per_device_batch_size: Samples in a batch of one process.
            max_num_train_steps: End after this many updates, if that comes first.
            gradient_accumulation_steps: Batches in an update. What is reported is the true loss, undivided.
            gradient_clip_value: Cut each number of a complete gradient off at plus and minus this.
            create_scheduler_fn: Makes a scheduler of the optimizer; a ``functools.partial`` may hold
                `TrainerPlaceholderValues`. It is stepped after each update.
            train_dataloader_kwargs: For the training loader; each takes the place of a default.
            eval_dataloader_kwargs: The same for the loader of evaluations.
            reset_run_history: Begin with no metrics, at epoch 1; else this training goes on counting epochs.
            collate_fn: For both loaders.
            resume_from: A folder of `save_training_state`: continue there, to the same bits, up to `num_epochs` in all.
        """
        self.train_dataset, self.eval_dataset, self.collate_fn = train_dataset, eval_dataset, collate_fn
        self.create_scheduler_fn, self.scheduler = create_scheduler_fn, None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self._asked_batch_size = per_device_batch_size
        if reset_run_history and resume_from is None:
            self.run_history.reset()
        self._train_dataloader = self.create_train_dataloader(per_device_batch_size, train_dataloader_kwargs)
        self._eval_dataloader = None
        if eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, eval_dataloader_kwargs)
        self.run_config = self._create_run_config(
            num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value
        )
        self._check_eval_batches()
        if create_scheduler_fn is not None:
            self.scheduler = self.create_scheduler()
        front = Front(self)
        native = self._native(
            front, self._train_dataloader, num_epochs, max_num_train_steps, accumulate=gradient_accumulation_steps
        )
        native.fit(resume=False if resume_from is None else state_in(resume_from))

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Evaluate; the run history then has ``evaluation_loss`` and nothing of before. Every process must call this.

        Args:
            dataset: None takes that of the last training.
            per_device_batch_size: Samples in a batch of one process.
            dataloader_kwargs: For the loader; each takes the place of a default.
            collate_fn: For the loader.
        """
        self.eval_dataset = self.eval_dataset if dataset is None else dataset
        self.collate_fn = self.collate_fn if collate_fn is None else collate_fn
        if self.eval_dataset is None:
            raise ValueError("evaluate needs a dataset: expected evaluate(dataset), or train(..., eval_dataset=...) before it")
        self.run_history.reset()
        self._train_dataloader = self._train_dl_kwargs = None
        self._asked_batch_size = per_device_batch_size
        self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, dataloader_kwargs)
        self.run_config = self._create_run_config(1, 1, None, None)
        self._check_eval_batches()
        front = Front(self)
        native = self._native(front, self._eval_dataloader, 1, None)
        evaluation = EvalEpoch(self._eval_dataloader, name="evaluation", compute=front.compute_eval, metric="evaluation_loss")
        with suppress(Left):  # it was stopped, and this was told
            native.judge(evaluation)

    # -- parts, for those who know them ----------------------------------------------------------------------

    def _create_accelerator(self) -> Accelerator:
        return Accelerator(driver_of(self._driver))

    _driver: str | Driver = "auto"

    def _create_callback_handler(self, callbacks: Callbacks) -> CallbackHandler:
        limit = batches_limit()
        return CallbackHandler([*([] if limit is None else [LimitBatchesCallback(limit)]), *callbacks])

    def _create_run_config(
        self, num_epochs: int, accumulate: int, max_num_train_steps: int | None, clip_value: float | None
    ) -> TrainerRunConfig:
        driver = self._accelerator.driver
        train, evaluation = self._train_dl_kwargs, self._eval_dl_kwargs
        train_size = self._batch_size(self._train_dataloader, train)
        eval_size = self._batch_size(self._eval_dataloader, evaluation) or train_size
        batches = length_of(self._train_dataloader)
        updates = None if batches is None else -(-batches // accumulate)
        if max_num_train_steps is not None and updates:
            num_epochs = min(num_epochs, -(-max_num_train_steps // updates))
        return TrainerRunConfig(
            num_epochs=num_epochs,
            train_per_device_batch_size=train_size,
            train_dl_kwargs=train,
            eval_per_device_batch_size=eval_size,
            eval_dl_kwargs=evaluation,
            gradient_accumulation_steps=accumulate,
            gradient_clip_value=clip_value,
            train_total_batch_size=None if train_size is None else train_size * driver.world_size * accumulate,
            eval_total_batch_size=None if eval_size is None else eval_size * driver.world_size,
            num_update_steps_per_epoch=updates,
            num_local_update_steps_per_epoch=updates,
            max_num_train_steps=max_num_train_steps or (None if updates is None else num_epochs * updates),
            is_local_process_zero=driver.local_rank == 0,
            is_world_process_zero=driver.is_main,
            is_distributed=driver.world_size > 1,
            mixed_precision=_mixed_precision(),
            num_processes=driver.world_size,
        )

    def _batch_size(self, loader: Any, kwargs: Mapping[str, Any] | None) -> int | None:
        """Return how many samples a batch of a loader has; None if there is no loader."""
        if loader is None:
            return None
        size: int | None = getattr(loader, "batch_size", None) or (kwargs or {}).get("batch_size", self._asked_batch_size)
        return size

    def _check_eval_batches(self) -> None:
        config = self.run_config
        if config is not None and config.is_distributed and self._eval_dataloader is not None:
            check_uneven(length_of(self.eval_dataset), config.eval_total_batch_size, config.num_processes, self.print)

    def _clip_gradients(self) -> None:
        assert self.run_config is not None, "it is called during a run"
        assert self.native_run is not None, "it is called during a run"
        ClipGradients(max_value=self.run_config.gradient_clip_value).on_before_optimizer_step(self.native_run)

    def _native(self, front: Front, loader: Any, epochs: int, max_steps: int | None, *, accumulate: int = 1) -> _NativeTrainer:
        return _NativeTrainer(
            self.model,
            self.optimizer,
            loader,
            front.compute_train,
            max_epochs=epochs,
            max_steps=max_steps,
            accumulate=accumulate,
            precision={"no": "fp32"}.get(_mixed_precision(), _mixed_precision()),
            callbacks=[front, *self.callback_handler, Back(self)],
            driver=self._accelerator.driver,
        )


class _NativeTrainer(NativeTrainer):
    """The native trainer of a run; it can also judge with an evaluation that is there."""

    def judge(self, evaluation: EvalEpoch) -> None:
        """Evaluate, as `evaluate` does."""
        evaluate(self._new_run(training=False), evaluation)


def _mixed_precision() -> str:
    """Return what ``accelerate launch --mixed_precision`` asks for."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


class TrainerWithTimmScheduler(Trainer):
    """For schedulers of timm: ``step_update`` after each update, ``step`` after each epoch's evaluation."""

    _updates = 0

    def training_run_start(self) -> None:
        """Begin to count updates."""
        super().training_run_start()
        self._updates = 0 if self.native_run is None else self.native_run.progress.step

    def scheduler_step(self) -> None:
        """Tell the scheduler of an update."""
        self._updates += 1
        self.scheduler.step_update(num_updates=self._updates)

    def eval_epoch_end(self) -> None:
        """Tell the scheduler of an epoch."""
        super().eval_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.run_history.current_epoch)
