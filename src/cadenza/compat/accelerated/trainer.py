"""``pytorch_accelerated.trainer``: a trainer with methods to override."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import (
    LimitBatchesCallback,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    TerminateOnNaNCallback,
)
from cadenza.compat.accelerated.checks import check_lengths, check_parts, check_scheduler_fn, check_uneven
from cadenza.compat.accelerated.events import StopTrainingError
from cadenza.compat.accelerated.face import state_in
from cadenza.compat.accelerated.first_and_last import FirstCallback, LastCallback
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.overridable import Overridable
from cadenza.compat.accelerated.placeholders import TrainerPlaceholderValues
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker, RunHistory
from cadenza.compat.accelerated.utils import batches_limit
from cadenza.drivers import driver_of
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.loaders import length_of
from cadenza.optim.precision import Precision
from cadenza.run import Run
from cadenza.trainer import Trainer as NativeTrainer

if TYPE_CHECKING:
    from cadenza.drivers import Driver

__all__ = ["DEFAULT_CALLBACKS", "StopTrainingError", "Trainer", "TrainerPlaceholderValues", "TrainerWithTimmScheduler"]

advise(__name__)

Callbacks = Iterable[BaseCallback | type[BaseCallback]]


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[BaseCallback], ...]:
    """Return the default callback classes of a trainer."""
    bar = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback, *bar, LogMetricsCallback)


DEFAULT_CALLBACKS = get_default_callbacks()


class Trainer(Overridable):
    """Train and evaluate a model. Subclasses override its methods to change a part.

    `train` builds a native ``Trainer`` and fits it; `native_run` is the run. `Overridable` lists the hooks. A hook such as
    `train_epoch_start` is called before the event of the same name.

    Args:
        model: An ``nn.Module``.
        loss_func: Called as ``loss_func(model_outputs, targets)``.
        optimizer: An optimizer of parameters of the model.
        callbacks: Instances, or classes that need no arguments, native ones included. ``()`` turns the defaults off.
        run_history: Stores the metrics; None stores them in memory.

    Raises:
        TypeError: An argument has a wrong type, or a subclass overrides `_run_train_epoch`, which is never called.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: Optimizer,
        callbacks: Callbacks = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
    ) -> None:
        check_parts(type(self), model, optimizer, callbacks)
        self.model, self.loss_func, self.optimizer = model, loss_func, optimizer
        self.callback_handler = self._create_callback_handler(callbacks)
        self.run_history = InMemoryRunHistory() if run_history is None else run_history
        self._accelerator = self._create_accelerator()
        self._loss_tracker = LossTracker()
        self.scheduler = self.create_scheduler_fn = self.run_config = self.native_run = None
        self.train_dataset = self.eval_dataset = self.collate_fn = None
        self._train_dataloader = self._eval_dataloader = None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self._default_batch_size = 8
        self._resume_from: str | os.PathLike[str] | None = None
        self._precision = Precision()
        self._updated = True
        self.callback_handler.call_event("on_init_end", self)

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
            train_dataset: The data set for `create_train_dataloader`.
            num_epochs: The number of epochs.
            eval_dataset: Evaluated after each epoch; None: no evaluation.
            per_device_batch_size: The number of samples in a batch of one process.
            max_num_train_steps: End after this many updates, or after `num_epochs`, whichever comes first.
            gradient_accumulation_steps: The number of batches in an update. Reported losses are not divided by it.
            gradient_clip_value: Clip each element of the complete gradients to this absolute value.
            create_scheduler_fn: Returns a scheduler for the optimizer. A ``functools.partial`` may hold
                `TrainerPlaceholderValues`. The scheduler is stepped after each update.
            train_dataloader_kwargs: Arguments of the training loader. Each replaces a default.
            eval_dataloader_kwargs: The same for the evaluation loader.
            reset_run_history: Start with no metrics at epoch 1; False continues to count epochs.
            collate_fn: The collate function of both loaders.
            resume_from: A folder of `save_training_state`. The result is bit-identical. `num_epochs` counts from the start.

        Raises:
            ValueError, TypeError: An argument is wrong.
        """
        check_lengths(num_epochs, max_num_train_steps, gradient_accumulation_steps, gradient_clip_value)
        check_scheduler_fn(create_scheduler_fn)
        self.train_dataset, self.eval_dataset, self.collate_fn = train_dataset, eval_dataset, collate_fn
        self.create_scheduler_fn, self.scheduler = create_scheduler_fn, None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self._default_batch_size = per_device_batch_size
        if reset_run_history and resume_from is None:
            self.run_history.reset()
        self._train_dataloader = self.create_train_dataloader(per_device_batch_size, train_dataloader_kwargs)
        self._eval_dataloader = None
        if eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, eval_dataloader_kwargs)
        self._prepare_model_optimizer_and_dataloaders()
        self.run_config = self._create_run_config(
            num_epochs=num_epochs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_num_train_steps=max_num_train_steps,
            gradient_clip_value=gradient_clip_value,
        )
        self._check_eval_batches()
        if create_scheduler_fn is not None:
            self.scheduler = self.create_scheduler()
        self._resume_from = resume_from
        self._run_training()

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Evaluate. The run history is reset and gets ``evaluation_loss``. Every process must call this.

        Args:
            dataset: The data set; None takes the ``eval_dataset`` of the last training.
            per_device_batch_size: The number of samples in a batch of one process.
            dataloader_kwargs: Arguments of the loader. Each replaces a default.
            collate_fn: The collate function of the loader.
        """
        self.eval_dataset = self.eval_dataset if dataset is None else dataset
        self.collate_fn = self.collate_fn if collate_fn is None else collate_fn
        if self.eval_dataset is None:
            raise ValueError(
                "evaluate needs a dataset; got None. Call evaluate(dataset), or train(..., eval_dataset=...) before it"
            )
        self.run_history.reset()
        self._train_dataloader = self._train_dl_kwargs = None
        self._default_batch_size = per_device_batch_size
        self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, dataloader_kwargs)
        self._prepare_model_optimizer_and_dataloaders()
        self.run_config = self._create_run_config(
            num_epochs=1, gradient_accumulation_steps=1, max_num_train_steps=None, gradient_clip_value=None
        )
        self._check_eval_batches()
        self._run_evaluation()

    # -- private in the original, overridden by its users ----------------------------------------------------------------------

    def _create_accelerator(self) -> Accelerator:
        return Accelerator(driver_of(self._driver))

    _driver: str | Driver = "auto"

    def _create_callback_handler(self, callbacks: Callbacks) -> CallbackHandler:
        limit = batches_limit()
        return CallbackHandler([*([] if limit is None else [LimitBatchesCallback(limit)]), *callbacks])

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Move the user's own module to the device. A driver wraps it later, at the start of the run.

        An override may replace `model`, `optimizer`, `_train_dataloader` and `_eval_dataloader`.
        """
        self.model = self.get_model().to(self.device)

    def _create_run_config(
        self,
        num_epochs: int,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        """Return the settings of a run, which the training uses. All arguments are passed by name."""
        accumulate, driver = gradient_accumulation_steps, self._accelerator.driver
        train, evaluation = self._train_dl_kwargs, self._eval_dl_kwargs
        train_size = self._batch_size(self._train_dataloader, train)
        eval_size = self._batch_size(self._eval_dataloader, evaluation) or train_size
        batches = self._batches_of_each(self._train_dataloader)
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
            gradient_clip_value=gradient_clip_value,
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
        """Return the number of samples in a batch of a loader; None if there is no loader."""
        if loader is None:
            return None
        size: int | None = getattr(loader, "batch_size", None) or (kwargs or {}).get("batch_size", self._default_batch_size)
        return size

    def _check_eval_batches(self) -> None:
        config = self.run_config
        if config is not None and config.is_distributed and self._eval_dataloader is not None:
            check_uneven(length_of(self.eval_dataset), config.eval_total_batch_size, config.num_processes, self.print)

    def _run_training(self) -> None:
        """Train with the settings of `run_config`. An override must call this method: the native trainer runs here."""
        config = self.run_config
        assert config is not None, "created before"
        epochs, updates, limit = config.num_epochs, config.num_update_steps_per_epoch, config.max_num_train_steps
        if epochs is not None and updates is not None and limit is not None and limit >= epochs * updates:
            limit = None  # num_epochs ends the training first
        resume = False if self._resume_from is None else state_in(self._resume_from)
        lengths = {"max_epochs": epochs, "max_steps": limit, "accumulate": config.gradient_accumulation_steps}
        self._native(FirstCallback(self), self._train_dataloader, **lengths).fit(resume=resume)

    def _run_evaluation(self) -> None:
        """Evaluate, with the events of an evaluation outside of a training. An override must call this method."""
        front = FirstCallback(self)
        run = self._native(front, self._eval_dataloader, max_epochs=1).new_run()
        front.evaluate(run)

    def _native(self, front: FirstCallback, loader: Any, **lengths: Any) -> _NativeTrainer:
        return _NativeTrainer(
            self.model,
            self.optimizer,
            loader,
            front.compute_train,
            precision={"no": "fp32"}.get(_mixed_precision(), _mixed_precision()),
            callbacks=[front, *self.callback_handler, LastCallback(self)],
            driver=self._accelerator.driver,
            progress=False,
            **lengths,
        )


class _NativeTrainer(NativeTrainer):
    """The native trainer of a run."""

    def new_run(self) -> Run:
        """Return a run without training, as the native `evaluate` creates it."""
        return self._new_session(training=False).run


def _mixed_precision() -> str:
    """Return the argument of ``accelerate launch --mixed_precision``."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


class TrainerWithTimmScheduler(Trainer):
    """A trainer for schedulers of timm: calls ``step_update`` after each update and ``step`` after each epoch's evaluation."""

    _updates = 0

    def training_run_start(self) -> None:
        """Start to count updates."""
        super().training_run_start()
        self._updates = 0 if self.native_run is None else self.native_run.progress.step

    def scheduler_step(self) -> None:
        """Call ``step_update`` of the scheduler."""
        self._updates += 1
        self.scheduler.step_update(num_updates=self._updates)

    def eval_epoch_end(self) -> None:
        """Call ``step`` of the scheduler."""
        super().eval_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.run_history.current_epoch)
