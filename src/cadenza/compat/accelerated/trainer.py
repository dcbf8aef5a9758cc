"""``pytorch_accelerated.trainer``: a trainer with methods to override."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cadenza.compat.accelerated.accelerate_folder import AccelerateState
from cadenza.compat.accelerated.callbacks import (
    LimitBatchesCallback,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
    WSDCheckpointCallback,
    get_default_callbacks,
)
from cadenza.compat.accelerated.checks import (
    check_accelerator,
    check_clip_value,
    check_history,
    check_overrides,
    check_parts,
    check_scheduler,
    check_scheduler_fn,
)
from cadenza.compat.accelerated.data import check_dataset, kwargs_for
from cadenza.compat.accelerated.events import StopTrainingError
from cadenza.compat.accelerated.first_and_last import FirstCallback, LastCallback
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.overridable import Overridable, overrides
from cadenza.compat.accelerated.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from cadenza.compat.accelerated.preparing import Callbacks, Preparing
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker, RunHistory
from cadenza.compat.accelerated.train_epoch import fit
from cadenza.compat.accelerated.trainer_api import training_state
from cadenza.compat.accelerated.utils import LIMIT_BATCHES_ENV_VAR, remove_padding, worker_init_fn
from cadenza.engine.loop import Training
from cadenza.engine.session import Session
from cadenza.hooks.numbers import at_least, at_least_or_none
from cadenza.loading.loaders import length_of
from cadenza.run import Run
from cadenza.status.progress import Counters
from cadenza.trainer import Trainer as NativeTrainer

__all__ = [
    "DEFAULT_CALLBACKS",
    "LIMIT_BATCHES_ENV_VAR",
    "CallbackHandler",
    "InMemoryRunHistory",
    "LimitBatchesCallback",
    "LogMetricsCallback",
    "LossTracker",
    "MoveModulesToDeviceCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "RunHistory",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerRunConfig",
    "TrainerWithTimmScheduler",
    "remove_padding",
    "replace_trainer_placeholder_values",
    "worker_init_fn",
]


DEFAULT_CALLBACKS = get_default_callbacks()


class Trainer(Preparing):
    """Train and evaluate a model. Subclasses override its methods to change a part.

    `train` builds a native ``Trainer`` and fits it; `native_run` is the run. `Overridable` and
    `Preparing` list the hooks. A hook such as
    `train_epoch_start` is called before the event of the same name.

    Args:
        model: An ``nn.Module``.
        loss_func: Called as ``loss_func(model_outputs, targets)``.
        optimizer: An optimizer of parameters of the model.
        callbacks: Instances, or classes that need no arguments, native ones included. ``()`` turns the defaults off.
        run_history: Stores the metrics; None stores them in memory.

    Raises:
        TypeError: An argument has a wrong type, or a subclass replaces a loop that the native trainer runs: see
            `_run_train_epoch`. The types of `model` and `optimizer` are checked when a run starts.
    """

    scheduler: Any
    native_run: None
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: Optimizer,
        callbacks: Callbacks = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
    ) -> None:
        check_overrides(type(self), Trainer)
        self.model: nn.Module = model
        self.loss_func: Any = loss_func
        self.optimizer: Optimizer = optimizer
        self._callbacks = callbacks
        self.callback_handler: CallbackHandler = self._create_callback_handler()
        if self.callback_handler is None:
            raise TypeError("_create_callback_handler must return a CallbackHandler; got None. Add the return statement")
        self.run_history: InMemoryRunHistory | RunHistory = InMemoryRunHistory() if run_history is None else run_history
        check_history(self.run_history)
        self._accelerator = self._create_accelerator()
        check_accelerator(self._accelerator, type(self))
        self._loss_tracker = LossTracker()
        self.scheduler = self.create_scheduler_fn = self.run_config = self.native_run = None
        self.train_dataset = self.eval_dataset = self.collate_fn = None
        self._train_dataloader = self._eval_dataloader = None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        self._resume_from: str | os.PathLike[str] | None = None
        self._state: str | AccelerateState | None = None
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
                A folder that pytorch-accelerated wrote continues after its last complete epoch.

        Raises:
            ValueError, TypeError: An argument is wrong.
            FileNotFoundError, CheckpointError: `resume_from` holds no training state, or one that cannot be read.
        """
        num_epochs = at_least(1, "num_epochs", num_epochs)
        max_num_train_steps = at_least_or_none(1, "max_num_train_steps", max_num_train_steps)
        gradient_accumulation_steps = at_least(1, "gradient_accumulation_steps", gradient_accumulation_steps)
        check_clip_value(gradient_clip_value)
        check_scheduler_fn(create_scheduler_fn)
        self._resume_from, self._state = resume_from, None
        if resume_from is not None and not overrides(self, Overridable.load_training_state):
            self._state = training_state(resume_from, self._accelerator.driver)  # before anything runs
        self.train_dataset, self.eval_dataset, self.collate_fn = train_dataset, eval_dataset, collate_fn
        self.create_scheduler_fn, self.scheduler = create_scheduler_fn, None
        self._train_dl_kwargs = self._eval_dl_kwargs = None
        if reset_run_history and resume_from is None:
            self.run_history.reset()
        self._train_dataloader = self.create_train_dataloader(per_device_batch_size, train_dataloader_kwargs)
        self._eval_dataloader = None
        if eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, eval_dataloader_kwargs)
        self._prepare_model_optimizer_and_dataloaders()
        check_parts(self.model, self.optimizer, training=True)
        self.run_config = self._create_run_config(
            per_device_batch_size=per_device_batch_size,
            num_epochs=num_epochs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_num_train_steps=max_num_train_steps,
            gradient_clip_value=gradient_clip_value,
        )
        self._check_eval_batch_size()
        if create_scheduler_fn is not None:
            self.scheduler = self.create_scheduler()
            check_scheduler(self.scheduler, _STEPS.get(type(self).scheduler_step), type(self).__name__)
        if resume_from is not None and overrides(self, Overridable.load_training_state):
            metadata = self.load_training_state(resume_from)
            self.run_history._set_epoch(metadata.get("current_epoch", self.run_history.current_epoch))
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
        self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, dataloader_kwargs)
        self._prepare_model_optimizer_and_dataloaders()
        check_parts(self.model, self.optimizer, training=False)
        self.run_config = self._create_run_config(
            per_device_batch_size=per_device_batch_size,
            num_epochs=1,
            gradient_accumulation_steps=1,
            max_num_train_steps=None,
            gradient_clip_value=None,
        )
        self._check_eval_batch_size()
        self._run_evaluation()

    # -- to override: the loaders -------------------------------------------------------------------------------

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of `train_dataset`."""
        self._train_dl_kwargs = kwargs_for(self.get_default_train_dl_kwargs(batch_size), train_dl_kwargs)
        check_dataset(self.train_dataset)
        return DataLoader(dataset=self.train_dataset, **{"collate_fn": self.collate_fn, **self._train_dl_kwargs})

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Mapping[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of `eval_dataset`."""
        self._eval_dl_kwargs = kwargs_for(self.get_default_eval_dl_kwargs(batch_size), eval_dl_kwargs)
        check_dataset(self.eval_dataset)
        return DataLoader(dataset=self.eval_dataset, **{"collate_fn": self.collate_fn, **self._eval_dl_kwargs})

    # -- the two runs ----------------------------------------------------------------------------------------------

    def _run_training(self) -> None:
        """Train with the settings of `run_config`. An override must call this method, which runs the native trainer."""
        config = self.run_config
        if config is None:
            raise TypeError("_create_run_config must return a TrainerRunConfig; got None. Add the return statement")
        epochs, updates, limit = config.num_epochs, config.num_update_steps_per_epoch, config.max_num_train_steps
        if epochs is not None and updates is not None and limit is not None and limit >= epochs * updates:
            limit = None  # num_epochs ends the training first
        lengths = {"max_epochs": epochs, "max_steps": limit, "accumulate": config.gradient_accumulation_steps}
        native = self._native(FirstCallback(self), self._train_dataloader, **lengths)
        state = self._state
        if state is None and self._resume_from is not None:
            state = training_state(self._resume_from, self._accelerator.driver)
        if isinstance(state, AccelerateState):
            native.restore = partial(self._restore, state)
        native.fit(resume=state if isinstance(state, str) else False)

    def _restore(self, state: AccelerateState, session: Session) -> None:
        """Restore a state of pytorch-accelerated in a run that is set up. Every process must call this."""
        assert self.run_config is not None, "created before"
        batches, updates = session.progress.batches_per_whole_epoch, self.run_config.num_update_steps_per_epoch
        model = self.get_model(keep_torch_compile=False)
        state.resume(model, self.optimizer, self.scheduler, state.updates(updates))
        if state.scaler:
            session.precision.load_state_dict(state.scaler)
        epochs = state.finished_epochs(updates, batches)
        samples = epochs * (length_of(self.train_dataset) or 0)
        at = Counters(epochs, epochs * (updates or 0), epochs * (batches or 0), 0, samples)
        session.progress.begin(at, batches)
        self.run_history._set_epoch(epochs + 1)
        counts: dict[str, Any] = {"saved": [], "step": at.batch, "last_checkpoint_step": state.metadata.get("step")}
        for callback in self.callback_handler:  # the folder holds no callback states
            if isinstance(callback, SaveTrainingStateCallback | WSDCheckpointCallback):
                callback.load_state_dict(counts)
        if state.rng_state is not None:
            session.restored.rng_state, session.restored.gradients = state.rng_state, []
        self.print(f"The training continues with epoch {epochs + 1}, from {state.folder}")

    def _run_evaluation(self) -> None:
        """Evaluate, with the events of an evaluation outside of a training. An override must call this method."""
        front = FirstCallback(self)
        run = self._native(front, self._eval_dataloader, max_epochs=1).new_run()
        front.evaluate(run)

    def _native(self, front: FirstCallback, loader: Any, **lengths: Any) -> _NativeTrainer:
        native = _NativeTrainer(
            self.model,
            _none if self.optimizer is None else self.optimizer,  # an evaluation needs no optimizer
            loader,
            front.compute_train,
            precision=self._accelerator.native_precision,
            callbacks=[front, *self.callback_handler, LastCallback(self)],
            driver=self._accelerator.driver,
            progress=False,
            **lengths,
        )
        native.trainer = self
        return native


def _none(parameters: object) -> list[Optimizer]:
    return []


class _NativeTrainer(NativeTrainer):
    """The native trainer of a run."""

    trainer: Trainer
    """The trainer of the adapter."""
    restore: Callable[[Session], None] | None = None
    """Restores a state that is not a native checkpoint."""

    def _set_up_session(self, session: Session) -> None:
        super()._set_up_session(session)
        if self.restore is not None:
            self.restore(session)

    def _do_steps(self, training: Training) -> None:
        fit(self.trainer, self.trainer._run_train_epoch, training)

    def new_run(self) -> Run:
        """Return a run without training, as the native `evaluate` creates it."""
        return self._make_session().run


class TrainerWithTimmScheduler(Trainer):
    """A trainer for schedulers of timm: calls ``step_update`` after each update and ``step`` after each epoch's evaluation."""

    num_updates: int = 0
    """The number of updates of the training so far."""

    def training_run_start(self) -> None:
        """Start to count updates."""
        super().training_run_start()
        self.num_updates = 0 if self.native_run is None else self.native_run.progress.step

    def scheduler_step(self) -> None:
        """Call ``step_update`` of the scheduler."""
        self.num_updates += 1
        self.scheduler.step_update(num_updates=self.num_updates)

    def eval_epoch_end(self) -> None:
        """Call ``step`` of the scheduler."""
        super().eval_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.run_history.current_epoch)


_STEPS = {Trainer.scheduler_step: "step", TrainerWithTimmScheduler.scheduler_step: "step_update"}
"""Maps each trainer's ``scheduler_step`` to the scheduler method that it calls."""
