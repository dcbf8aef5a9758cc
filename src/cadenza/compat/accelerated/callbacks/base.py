"""The base class of pytorch-accelerated's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from cadenza.compat.accelerated.adapted import AdaptedRun
from cadenza.compat.accelerated.events import (
    EVENTS,
    AcceleratedCallback,
    CallbackMethodNotImplementedError,
    EpochStart,
    as_batch_output,
    train_step,
)
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_READING = (
    "on_train_epoch_end",
    "on_eval_epoch_start",
    "on_eval_epoch_end",
    "on_training_run_epoch_end",
    "on_training_run_end",
    "on_evaluation_run_start",
    "on_evaluation_run_end",
    "on_stop_training_error",
)


class TrainerCallback(AcceleratedCallback):
    """Base class with the 15 events of pytorch-accelerated; override those you need.

    It works in the adapter's `Trainer` and in a native one. In a native trainer, ``trainer`` is a view on the run. Its
    ``run_history`` has ``train_loss_epoch``, and, if there is an ``Evaluate``, ``eval_loss_epoch`` and the results of that
    evaluation under their own names. The callback runs after ``Evaluate``, so it can read these results.

    Accept ``**kwargs`` in each event. A method with another name is a custom event: see `CallbackHandler.call_event`.
    """

    after: Relation = (Phase.EVALUATE,)

    absent: ClassVar[Mapping[str, str]] = {}
    """Attributes that only the original's callback has, and their replacements."""

    def on_init_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called when the trainer is created; ``trainer.run_config`` is None. In a native trainer: when a run is set up."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before the first epoch."""

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before the first batch of an epoch."""

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before the forward pass of a batch."""

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """Called between the forward and the backward pass.

        Args:
            trainer: The trainer.
            batch: On the device.
            batch_output: The result of ``calculate_train_batch_loss``. A new ``loss`` in it replaces the old one.
            kwargs: ``step``: the index of the batch in its epoch, from 0.
        """

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called after the last step of an epoch, before its evaluation; ``train_loss_epoch`` is in the run history."""

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before an evaluation. ``is_intermediate`` says whether it runs inside a training epoch."""

    def on_eval_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before a batch of an evaluation."""

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """Called after a batch of an evaluation, with the result of ``calculate_eval_batch_loss``."""

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called after an evaluation; its loss is in the run history."""

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called at the end of an epoch, after its evaluation if there is one."""

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called at the end of the training, unless an error ended it."""

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called before an evaluation outside of a training."""

    def on_evaluation_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """Called after an evaluation outside of a training."""

    def on_stop_training_error(self, trainer: Any, **kwargs: Any) -> None:
        """Called when a `StopTrainingError` or a native callback has stopped the training."""

    if not TYPE_CHECKING:  # type checkers keep reporting unknown names

        def __getattr__(self, name: str) -> NoReturn:
            hint = f". {self.absent[name]}" if name in self.absent else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise CallbackMethodNotImplementedError(message, name=name)

    # -- listeners ---------------------------------------------------------------------------------------

    def reads_history(self) -> bool:
        return any(name in _READING for name in self._overridden())

    def listeners(self) -> list[Listener]:
        events = [
            (EpochStart if name == "on_train_epoch_start" else Listener)(moment, self._dispatch(name))
            for name in self._overridden()
            if (moment := EVENTS[name].moment)
        ]
        if doubts := self._doubtful():
            events.append(Listener(Callback.on_setup, partial(_warn, doubts)))
        if "on_train_step_end" in self._overridden():
            events.append(Listener(Callback.on_batch_end, self._end_of_step_fn))
        if not self.reads_history():
            return events
        once = partial(_once, self)
        before = [
            Listener(Callback.on_epoch_start, once(AdaptedRun.open_epoch)),
            Listener(Callback.on_batch_end, partial(_track, self)),
            Listener(Callback.on_epoch_end, once(AdaptedRun.agree)),
            Listener(Callback.on_epoch_end, once(AdaptedRun.close_steps)),
            Listener(Callback.on_eval_start, once(_before_evaluation)),
            Listener(Callback.on_eval_end, partial(_record, self)),
            Listener(Callback.on_stop, once(AdaptedRun.close_for_a_stop)),
            Listener(Callback.on_save, partial(_save, self)),
            Listener(Callback.on_load, partial(_load, self)),
        ]
        after = [
            Listener(Callback.on_eval_end, once(_after_evaluation, last=True)),
            Listener(Callback.on_epoch_end, once(AdaptedRun.agree, last=True)),
            Listener(Callback.on_epoch_end, once(AdaptedRun.close_epoch, last=True)),
        ]
        return [*before, *events, *after]

    def _overridden(self) -> list[str]:
        return [name for name in EVENTS if getattr(getattr(self, name), "__func__", None) is not getattr(TrainerCallback, name)]

    def _doubtful(self) -> list[str]:
        """Return a warning for each method named like an event, as it may be misspelled."""
        others = [name for name in dir(type(self)) if name.startswith("on_") and name not in (*EVENTS, "on_fault")]
        close = [(name, get_close_matches(name, EVENTS, n=1, cutoff=0.85)) for name in others]
        return [
            f"{type(self).__name__}.{name} is not an event: only callback_handler.call_event({name!r}) calls it. "
            f"Did you mean {match[0]!r}?"
            for name, match in close
            if match
        ]

    def _dispatch(self, name: str) -> Callable[..., None]:
        event = EVENTS[name]

        def call(run: Run, *arguments: Any) -> None:
            adapted = AdaptedRun.of(run)
            if name == "on_init_end" and adapted.facade:
                return  # the constructor of the trainer has called it
            if name == "on_train_epoch_start" and adapted.facade and not adapted.starting:
                return  # `AdaptedRun.start_epoch` calls it
            if name == "on_train_step_end" and (adapted.own_passes or adapted.session.step_fn is not None):
                return  # a step_fn may call backward several times in a batch, or never; see `_end_of_step_fn`
            adapted.deliver(name, self, lambda: event.keywords(run, *arguments))

        return call

    def _end_of_step_fn(self, run: Run, batch: Any, outputs: Any) -> None:
        adapted = AdaptedRun.of(run)
        if adapted.session.step_fn is not None and not adapted.session.step.skipping:
            adapted.deliver("on_train_step_end", self, lambda: train_step(run, outputs, ended=True))


# -- done once in a native run, by the first or the last callback of this adapter ----------------------------


def _once(callback: AcceleratedCallback, act: Callable[[AdaptedRun], object], *, last: bool = False) -> Callable[..., None]:
    def call(run: Run, *_: Any) -> None:
        adapted = AdaptedRun.of(run)
        if callback is (adapted.last if last else adapted.first) and unwinding(run) is None:
            act(adapted)

    return call


def _warn(doubts: list[str], run: Run) -> None:
    for doubt in doubts:
        run.warn(doubt)


def _track(callback: AcceleratedCallback, run: Run, batch: Any, outputs: Mapping[str, Any]) -> None:
    adapted = AdaptedRun.of(run)
    if callback is adapted.first and not adapted.session.step.discarded and "loss" in outputs and unwinding(run) is None:
        output = as_batch_output(outputs, batch)
        adapted.trainer._update_loss_tracker(output["loss"], output["batch_size"])


def _record(callback: AcceleratedCallback, run: Run, evaluation: Evaluation) -> None:
    adapted = AdaptedRun.of(run)
    if callback is adapted.first:
        adapted.record(evaluation)


def _save(callback: AcceleratedCallback, run: Run, checkpoint: Any) -> None:
    adapted = AdaptedRun.of(run)
    if callback is adapted.first:
        adapted.save(checkpoint)


def _load(callback: AcceleratedCallback, run: Run, loaded: Any) -> None:
    adapted = AdaptedRun.of(run)
    if callback is adapted.first:
        adapted.load(loaded)


def _before_evaluation(adapted: AdaptedRun) -> None:
    adapted.close_steps()
    if not adapted.training:
        adapted.call_all("on_evaluation_run_start")


def _after_evaluation(adapted: AdaptedRun) -> None:
    if not adapted.training:
        adapted.call_all("on_evaluation_run_end")
