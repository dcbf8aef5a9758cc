"""``fastNLP.core.callbacks.callback``: 24 events, each a method to override."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp import api_of_0_5
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event, filter_of
from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback
from cadenza.compat.fastnlp.translation import EVENTS, agreement_listener, drop_listeners, entering, listeners_of
from cadenza.errors import nearest

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.adapted import AdaptedRun
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver
    from cadenza.hooks.listener import Listener


logger: logging.Logger = logging.getLogger("cadenza")


class Callback(ManagedCallback):
    """Base class with fastNLP's events; override those you need. It works in the adapter's `Trainer` and in a native one.

    Counters such as ``trainer.cur_epoch_idx`` count completed work. Return values of hooks are ignored, except for
    `on_save_checkpoint`.
    """

    _adapted: AdaptedRun | None = None  # a class attribute: subclasses need not call a constructor of this class

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, found in vars(cls).items():
            if not name.startswith("on_") or name in EVENTS or api_of_0_5.is_hook(name, found):
                continue
            if meant := nearest(name, EVENTS):
                logger.warning("%s.%s is not an event, and is never called by a training.%s", cls.__qualname__, name, meant)

    @property
    def callback_name(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return type(self).__name__

    @property
    def need_reproducible_sampler(self) -> bool:
        """Whether checkpoints need the order of the data. This adapter always saves it and does not read this property."""
        return False

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property raised an AttributeError: raise the same one
            raise api_of_0_5.missing(self, name)

    # -- a training, in the order of its events -----------------------------------------------------

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        """Called at the end of the trainer's constructor; in a native trainer when a run is set up."""

    def on_sanity_check_begin(self, trainer: TrainerView) -> None:
        """Called before the sanity check."""

    def on_sanity_check_end(self, trainer: TrainerView, sanity_check_res: dict[str, Any]) -> None:
        """Called after the sanity check, with its results."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Called before the first epoch. After it `on_train_end` is always called."""

    def on_train_epoch_begin(self, trainer: TrainerView) -> None:
        """Called before the first batch of an epoch is fetched."""

    def on_fetch_data_begin(self, trainer: TrainerView) -> None:
        """Called before a batch is fetched; N+1 times for N batches."""

    def on_fetch_data_end(self, trainer: TrainerView) -> None:
        """Called after a batch was fetched, and when the loader is exhausted; N+1 times for N batches."""

    def on_train_batch_begin(self, trainer: TrainerView, batch: Any, indices: list[int] | None) -> None:
        """Called with the batch on the device, after ``input_mapping``. Changes in place reach the model.

        `indices` are the indices of the batch in the data set; None if the loader does not provide them.
        """

    def on_before_backward(self, trainer: TrainerView, outputs: Any) -> None:
        """Called after the forward pass and ``output_mapping``. A new ``outputs["loss"]`` replaces the old one."""

    def on_after_backward(self, trainer: TrainerView) -> None:
        """Called after the gradients of this batch were added."""

    def on_before_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called before an update, once per ``accumulation_steps`` batches. `optimizers` is the argument of the trainer."""

    def on_after_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called after an update."""

    def on_before_zero_grad(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called after an update, before the gradients are dropped."""

    def on_after_zero_grad(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called after the gradients were dropped."""

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Called when a batch is complete and counted."""

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        """Called before an evaluation: after `on_train_batch_end`, or before `on_train_epoch_end` if it is due by epochs."""

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        """Called after an evaluation, with results such as ``{"acc#acc": 0.93}``."""

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Called when an epoch is complete and counted: ``cur_epoch_idx`` is the index of the next one."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Called last, after every `on_train_begin`."""

    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        """Called before `on_train_end` if an error, Ctrl-C or an `EarlyStopException` ended the training."""

    # -- files -----------------------------------------------------------------------------------------

    def on_save_model(self, trainer: TrainerView) -> None:
        """Called by ``trainer.save_model``; nothing is written yet."""

    def on_load_model(self, trainer: TrainerView) -> None:
        """Called by ``trainer.load_model``; nothing is read yet."""

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any] | None:
        """Return the states of this callback for a checkpoint: numbers, strings, tensors, lists, dicts."""

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        """Called after all other state is restored, with the states from `on_save_checkpoint`."""

    # -- not events ------------------------------------------------------------------------------------

    def hook_at(self, event: str) -> Callable[..., Any] | None:
        """Return the hook of an event; None if this class does not override it."""
        found = getattr(self, event)
        idle = getattr(found, "__func__", None) is getattr(Callback, event)
        return None if idle else found

    def listeners(self) -> list[Listener]:
        api_of_0_5.refuse(self)
        hooks = {event: hook for event in EVENTS if (hook := self.hook_at(event)) is not None}
        own = [listener for event, hook in hooks.items() for listener in listeners_of(self, event, hook)]
        return [entering(self.enter_run), *([agreement_listener()] if hooks else []), *drop_listeners(hooks), *own]

    def enter_run(self, adapted: AdaptedRun) -> None:
        """Start a run. Filters restart their counters, unless the run resumes."""
        self._adapted = adapted
        if not adapted.trainer.global_forward_batches:
            for event in EVENTS:
                if (found := filter_of(getattr(self, event))) is not None:
                    found.reset()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._adapted is None else self.saved_state(self._adapted.trainer)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        if self._adapted is not None:
            self.restore_state(self._adapted.trainer, state)

    def saved_state(self, trainer: TrainerView) -> dict[str, Any]:
        """Return the entry of this callback in a checkpoint: its states and the counters of its filters."""
        save = self.hook_at("on_save_checkpoint")
        states = None if save is None else save(trainer)
        filters = {event: found.state_dict() for event in EVENTS if (found := filter_of(getattr(self, event)))}
        return {**({} if states is None else {"states": states}), **({"filter_states": filters} if filters else {})}

    def restore_state(self, trainer: TrainerView, saved: Mapping[str, Any]) -> None:
        """Restore the entry that `saved_state` returned."""
        for event, counted in saved.get("filter_states", {}).items():
            if (found := filter_of(getattr(self, event))) is not None:
                found.load_state_dict(counted)
        load = self.hook_at("on_load_checkpoint")
        if load is not None and "states" in saved:
            load(trainer, saved["states"])


class _CallbackWrapper(Callback):
    """A function registered for an event, with a separate filter."""

    def __init__(self, event: Event, fn: Callable[..., Any]) -> None:
        self.fn, self.event = fn, event
        self.name = self.callback_name
        setattr(self, event.value, event.filter()(fn))

    @property
    def callback_name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)
