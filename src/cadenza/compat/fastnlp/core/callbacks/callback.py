"""``fastNLP.core.callbacks.callback``: 24 events, each a method to override."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.callback_event import Event, filter_of
from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback
from cadenza.compat.fastnlp.translation import PLACES, agreeing, guard, hearing, keeping
from cadenza.errors import nearest

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.adapted import AdaptedRun
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver
    from cadenza.hooks.listener import Listener

logger = logging.getLogger("cadenza")


class Callback(ManagedCallback):
    """Your own code at fastNLP's events; override those you need. Works in this `Trainer` and in a native one.

    Counters such as ``trainer.cur_epoch_idx`` count what is complete. What hooks return is ignored, but for what
    `on_save_checkpoint` does.
    """

    _adapted: AdaptedRun | None = None  # of the run under way; a class attribute, as subclasses need not call our constructor

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in vars(cls):
            if name.startswith("on_") and name not in PLACES and (meant := nearest(name, PLACES)):
                logger.warning("%s.%s is no event, and is not called by a training.%s", cls.__qualname__, name, meant)

    @property
    def callback_name(self) -> str:
        """The name under which a checkpoint holds this callback's state."""
        return type(self).__name__

    @property
    def need_reproducible_sampler(self) -> bool:
        """Whether the order of the data must be known to a checkpoint. It always is, so nobody asks."""
        return False

    # -- a training, in the order in which it goes -----------------------------------------------------

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        """Called last by the trainer's constructor; in a native trainer when the run is set up."""

    def on_sanity_check_begin(self, trainer: TrainerView) -> None:
        """Called before the trial evaluation."""

    def on_sanity_check_end(self, trainer: TrainerView, sanity_check_res: dict[str, Any]) -> None:
        """Called after the trial evaluation, with its results."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Called before the first epoch. From here on `on_train_end` is certain."""

    def on_train_epoch_begin(self, trainer: TrainerView) -> None:
        """Called before the first batch of an epoch is fetched."""

    def on_fetch_data_begin(self, trainer: TrainerView) -> None:
        """Called before the loader is asked for a batch; N+1 times for N batches."""

    def on_fetch_data_end(self, trainer: TrainerView) -> None:
        """Called after the loader was asked, also when it had no more; N+1 times for N batches."""

    def on_train_batch_begin(self, trainer: TrainerView, batch: Any, indices: list[int] | None) -> None:
        """Called with the batch on the device, after ``input_mapping``. Changes in place reach the model.

        `indices` are the batch's places in the data set; None if the loader does not tell.
        """

    def on_before_backward(self, trainer: TrainerView, outputs: Any) -> None:
        """Called after the forward pass and ``output_mapping``. A loss put in place of ``outputs["loss"]`` is the one used."""

    def on_after_backward(self, trainer: TrainerView) -> None:
        """Called when the gradients of this batch are added."""

    def on_before_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called before an update, once for ``accumulation_steps`` batches. `optimizers` are as the trainer was given them."""

    def on_after_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called after an update."""

    def on_before_zero_grad(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called after an update, before the gradients are dropped."""

    def on_after_zero_grad(self, trainer: TrainerView, optimizers: Any) -> None:
        """Called when the gradients are dropped."""

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Called when a batch is complete and counted."""

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        """Called before an evaluation: after `on_train_batch_end`, or before `on_train_epoch_end` if it is due by epochs."""

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        """Called after an evaluation, with results such as ``{"acc#acc": 0.93}``."""

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Called when an epoch is complete and counted: ``cur_epoch_idx`` is that of the next."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Called last, always, once `on_train_begin` was entered."""

    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        """Called before `on_train_end` for whatever ended the training early: an error, Ctrl-C, an `EarlyStopException`."""

    # -- files -----------------------------------------------------------------------------------------

    def on_save_model(self, trainer: TrainerView) -> None:
        """Called by ``trainer.save_model``; nothing is written yet."""

    def on_load_model(self, trainer: TrainerView) -> None:
        """Called by ``trainer.load_model``; nothing is read yet."""

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any] | None:
        """Return what a checkpoint must hold for this callback: numbers, strings, tensors, lists, dicts."""

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        """Called when all else is restored, with what `on_save_checkpoint` returned."""

    # -- not events ------------------------------------------------------------------------------------

    def hook_at(self, event: str) -> Callable[..., Any] | None:
        """Return what this callback does at an event; None if it does nothing."""
        found = getattr(self, event)
        idle = getattr(found, "__func__", None) is getattr(Callback, event)
        return None if idle else found

    def listeners(self) -> list[Listener]:
        heard = {event: hook for event in PLACES if (hook := self.hook_at(event)) is not None}
        told = [listener for event, hook in heard.items() for listener in hearing(self, event, hook)]
        return [keeping(self.enter_run), *([agreeing()] if heard else []), *guard(heard), *told]

    def enter_run(self, adapted: AdaptedRun) -> None:
        """Know the run that begins.

        Filters count anew, unless it goes on where another one ended.
        """
        self._adapted = adapted
        if not adapted.trainer.global_forward_batches:
            for event in PLACES:
                if (found := filter_of(getattr(self, event))) is not None:
                    found.reset()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._adapted is None else self.saved_state(self._adapted.trainer)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        if self._adapted is not None:
            self.restore_state(self._adapted.trainer, state)

    def saved_state(self, trainer: TrainerView) -> dict[str, Any]:
        """Return what a checkpoint holds of it: its own states, and how far its filters have counted."""
        save = self.hook_at("on_save_checkpoint")
        states = None if save is None else save(trainer)
        filters = {event: found.state_dict() for event in PLACES if (found := filter_of(getattr(self, event)))}
        return {**({} if states is None else {"states": states}), **({"filter_states": filters} if filters else {})}

    def restore_state(self, trainer: TrainerView, kept: Mapping[str, Any]) -> None:
        """Take back what `saved_state` returned."""
        for event, counted in kept.get("filter_states", {}).items():
            if (found := filter_of(getattr(self, event))) is not None:
                found.load_state_dict(counted)
        load = self.hook_at("on_load_checkpoint")
        if load is not None and "states" in kept:
            load(trainer, kept["states"])


class _CallbackWrapper(Callback):
    """A function at one event, with a filter of its own."""

    def __init__(self, event: Event, fn: Callable[..., Any]) -> None:
        self.fn, self.event = fn, event
        self.name = self.callback_name
        setattr(self, event.value, event.filter()(fn))

    @property
    def callback_name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)
