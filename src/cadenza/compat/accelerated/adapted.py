"""The state of one run that the callbacks of pytorch-accelerated share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cadenza.compat.accelerated.events import (
    EVENTS,
    KEY,
    AcceleratedCallback,
    EpochStart,
    EvalEpoch,
    EvaluationStopped,
    Event,
    Events,
    StopTrainingError,
)
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.native import NativeRunView
from cadenza.compat.accelerated.trainer_api import STATE, TrainerApi, restore_state, state_of
from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.adapter.view import OfRun, Weak
from cadenza.engine.loop import Training
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.moments import BaseCallback, Callback

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class AdaptedRun(OfRun):
    """A native run, its ``trainer``, and the progress of pytorch-accelerated's events.

    Args:
        run: The native run.
        trainer: The argument of callbacks: the adapter's trainer, or a view on a native run.
        facade: Whether the adapter's trainer started the run.
    """

    trainer: Weak[TrainerApi] = Weak()

    def __init__(self, run: Run, trainer: TrainerApi, *, facade: bool) -> None:
        super().__init__(run)
        session = session_of(run)
        self.trainer = trainer
        self._view = None if facade else trainer  # nothing else refers to it
        self.facade: bool = facade
        self.training: bool = bool(run.optimizers)
        """Whether this run trains; false for ``Trainer.evaluate``."""
        self.stopped: bool = False
        """Whether the training was stopped. After that, only the events of the stop and the end are called."""
        self.requested: bool = False
        """Whether a callback on this rank requested the stop."""
        self.reason: str = ""
        self.broken: bool = False
        """Whether an error is propagating. From then on no event is called."""
        self.in_epoch: bool = False
        """Whether an epoch has started and its ``on_train_epoch_end`` was not called yet."""
        self.starting: bool = False
        """Whether the adapter's trainer calls ``on_train_epoch_start`` now."""
        self.steps: Training | None = None
        """Runs the steps of the current epoch. Only the adapter's trainer sets it."""
        self.stepped = False
        """Whether the steps of the current epoch have run. Only the adapter's trainer sets it."""
        self.loader: Iterable[Any] | None = trainer._train_dataloader
        """The training loader of the adapter's trainer that the run reads, perhaps limited."""
        self.output: Any = None
        """The result of the trainer's ``calculate_eval_batch_loss`` for the current batch."""
        self.own_passes = False
        """Whether the trainer's own ``_perform_forward_and_backward_passes`` calls ``on_train_step_end``."""
        readers = [callback for callback in callbacks_of(session.run, AcceleratedCallback) if callback.reads_history()]
        self.first: AcceleratedCallback | None = None if facade or not readers else readers[0]
        """The callback that keeps the run history of a native run and fires the work due before the others' events."""
        self.last: AcceleratedCallback | None = None if facade or not readers else readers[-1]
        """The callback that fires the work due after the others' events."""
        session.adapters[KEY] = self

    @staticmethod
    def of(run: Run) -> AdaptedRun:
        """Return the adapted run of a native run. If a native trainer started it, its trainer is a view on the run."""
        adapted: AdaptedRun | None = session_of(run).adapters.get(KEY)
        return adapted or AdaptedRun(run, NativeRunView(run), facade=False)

    # -- events ----------------------------------------------------------------------------------------

    def deliver(self, name: str, callback: BaseCallback, keywords: Callable[[], Mapping[str, Any]]) -> None:
        """Call an event of a callback, unless the training was stopped or failed before."""
        if self._admits(name) and callback in self.trainer.callback_handler and not self.by_handler:
            self._call(name, partial(getattr(callback, name), self.trainer), keywords, callback.on_fault)

    def deliver_to_all(self, name: str, keywords: Callable[[], Mapping[str, Any]]) -> None:
        """Call an event through the handler's overridden ``call_event``."""
        if self._admits(name):
            self._call(name, partial(self.trainer.callback_handler.call_event, name, self.trainer), keywords)

    @property
    def by_handler(self) -> bool:
        """Whether the handler's class overrides ``call_event``. It then receives every event once for all callbacks."""
        return type(self.trainer.callback_handler).call_event is not CallbackHandler.call_event

    def call_all(self, name: str) -> None:
        """Call an event without a native moment on all callbacks, in order."""
        if self.by_handler:
            self.deliver_to_all(name, dict)
            return
        for callback in self.trainer.callback_handler:
            if hasattr(callback, name):
                try:
                    self.deliver(name, callback, dict)
                except Exception as error:
                    error.add_note(f"raised in {type(callback).__name__}.{name}")
                    raise

    def _call(
        self, name: str, call: Callable[..., object], keywords: Callable[[], Mapping[str, Any]], on_fault: str = "raise"
    ) -> None:
        try:
            call(**keywords())
        except StopTrainingError as error:
            if not EVENTS[name].stops:
                self.broken = True
                raise
            if not self.stopped:
                self.stop(error)
        except BaseException as error:
            self.broken = not (isinstance(error, Exception) and on_fault == "disable")
            raise

    def _admits(self, name: str) -> bool:
        event: Event = EVENTS[name]
        if self.broken or (self.stopped and not event.after_stop) or not self.trainer.callback_handler._enabled:
            return False
        error = unwinding(self.run)
        # pytorch-accelerated calls nothing after an error
        return not (name.endswith("_end") and error is not None and not isinstance(error, EvaluationStopped))

    def call_hook(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        """Call a hook of the trainer; a `StopTrainingError` in it stops the training."""
        if self.stopped or self.broken:
            return None
        try:
            return hook(*arguments)
        except StopTrainingError as error:
            if not self.stopped:
                self.stop(error)
            return None
        except BaseException:
            self.broken = True
            raise

    def stop(self, error: StopTrainingError) -> None:
        """Stop the training now. After this, only the events of the stop and the end of the run are called.

        In a native run on multiple ranks, events are called until all ranks have agreed: a hook may contain a collective.
        """
        run, self.reason = self.run, str(error) or "StopTrainingError"
        self.requested = True
        self.stopped = self.facade or run.driver.world_size == 1
        run.stop(self.reason)
        if self.session.step.may_skip:
            run.skip_batch(self.reason)

    def agree(self) -> None:
        """Stop if any rank has stopped. Every rank must call this, unless an error is propagating."""
        if self.run.driver.world_size == 1 or self.broken or unwinding(self.run) is not None:
            return
        own = self.reason if self.stopped or self.requested else None
        reasons = [reason for reason in self.run.driver.gather(own) if reason is not None]
        if reasons and not self.stopped:
            if not self.requested:
                self.stop(StopTrainingError(reasons[0]))
            self.stopped = True

    def close_for_a_stop(self) -> None:
        """Record that the run is stopping, whoever requested it."""
        self.stopped = True

    # -- the run history ---------------------------------------------------------------------------------

    def record_train_loss(self) -> None:
        """Record the mean loss over the samples of the epoch. Every rank must call this."""
        self.trainer._add_epoch_loss_to_run_history("train_loss_epoch")

    def record(self, evaluation: Evaluation) -> None:
        """Record the results of an evaluation. Every rank must call this."""
        if self.stopped or not (evaluation.complete or evaluation.results):
            return
        if isinstance(evaluation, EvalEpoch) and self.facade:
            self.trainer._add_epoch_loss_to_run_history(evaluation.metric)
            return
        history, loss = self.trainer.run_history, evaluation.results.get(f"{evaluation.name}/loss")
        if loss is not None:
            history.update_metric(evaluation.metric if isinstance(evaluation, EvalEpoch) else self._metric(evaluation), loss)
        for key, value in evaluation.results.items():
            history.update_metric(key, value)

    def _metric(self, evaluation: Evaluation) -> str:
        if not self.training:
            return "evaluation_loss"
        return f"{evaluation.name}_loss" if self.session.cursor.in_epoch else f"{evaluation.name}_loss_epoch"

    # -- once per native run, by the first or the last callback ---------------------------------------

    def open_epoch(self) -> None:
        """Start an epoch."""
        self.in_epoch = True
        if not self.run.progress.batch_in_epoch:  # otherwise the epoch continues from a checkpoint
            self.trainer._loss_tracker.reset()

    def start_epoch(self) -> None:
        """Start an epoch of the adapter's trainer, and call ``on_train_epoch_start``."""
        self.open_epoch()
        hooks = self.session.hooks
        listeners = hooks.by_moment.get(Callback.on_epoch_start, ())
        self.starting = True
        try:
            hooks.call([listener for listener in listeners if isinstance(listener, EpochStart)], self.run)
        finally:
            self.starting = False

    def close_steps(self) -> None:
        """Fire ``on_train_epoch_end`` once, before the evaluation at the end of the epoch."""
        if self.in_epoch and (self.facade or not self.session.cursor.in_epoch) and not self.stopped:
            self.in_epoch = False
            self.record_train_loss()
            self.run.fire(Events.on_train_epoch_end)

    def close_epoch(self) -> None:
        """Fire ``on_training_run_epoch_end`` and count the epoch."""
        if not self.stopped and not self.broken and unwinding(self.run) is None:
            self.run.fire(Events.on_training_run_epoch_end)
            if not self.stopped:
                self.trainer.run_history._increment_epoch()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, checkpoint: Any) -> None:
        """Add the state of this adapter to a checkpoint. Every rank must call this."""
        state = {"in_epoch": self.in_epoch, **state_of(self.trainer)}
        if self.session.sync.together:  # skipped after an error on one rank
            state["losses"] = self.run.driver.gather(state["loss"])
        checkpoint.extra[STATE] = state

    def load(self, loaded: Any) -> None:
        """Restore the state that `save` added."""
        state = loaded.state.get("extra", {}).get(STATE)
        if state is not None:
            self.in_epoch = state["in_epoch"]
            restore_state(self.trainer, state, resume=True)
