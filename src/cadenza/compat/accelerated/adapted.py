"""One run as this dialect sees it: who is told of what, and until when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cadenza.compat.accelerated.eval_epoch import EvalEpoch
from cadenza.compat.accelerated.events import EVENTS, AcceleratedCallback, EvaluationStopped, Event, Events, StopTrainingError
from cadenza.compat.accelerated.face import STATE, TrainerFace, restore_state, state_of
from cadenza.compat.accelerated.native import NativeRunView
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.moments import BaseCallback

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

KEY = "accelerated"


class AdaptedRun:
    """A run, its ``trainer``, and how far the dialect's events have come.

    Args:
        run: The native run.
        trainer: What callbacks get: this dialect's trainer, or the view on a native run.
        facade: Whether it is this dialect's own trainer that runs it.
    """

    def __init__(self, run: Run, trainer: TrainerFace, *, facade: bool) -> None:
        self.run, self.trainer, self.facade = run, trainer, facade
        self.training = bool(run.optimizers)
        """Whether this is a training, and not an evaluation by itself."""
        self.stopped = False
        """Whether a stop was asked for, after which only a few events come."""
        self.asked = False
        """Whether a callback on this process asked for it."""
        self.reason = ""
        self.broken = False
        """Whether an error is on its way out, after which no event comes."""
        self.in_epoch = False
        """Whether an epoch began whose ``on_train_epoch_end`` is still to come."""
        readers = [one for one in run.hooks.callbacks.values() if isinstance(one, AcceleratedCallback) and one.reads_history()]
        self.first = None if facade or not readers else readers[0]
        """Who keeps the run history of a native run, and fires what comes before all others' events."""
        self.last = None if facade or not readers else readers[-1]
        """Who fires what comes after all others' events."""
        run.guests[KEY] = self

    @staticmethod
    def of(run: Run) -> AdaptedRun:
        """Return the adapted run of a native run. If a native trainer started it, its trainer is a view on the run."""
        adapted: AdaptedRun | None = run.guests.get(KEY)
        return adapted or AdaptedRun(run, NativeRunView(run), facade=False)

    # -- events ----------------------------------------------------------------------------------------

    def deliver(self, name: str, callback: BaseCallback, keywords: Callable[[], Mapping[str, Any]]) -> None:
        """Call an event of a callback, if it is one that still comes."""
        event = EVENTS[name]
        if not self._admits(name, event, callback):
            return
        try:
            getattr(callback, name)(self.trainer, **keywords())
        except StopTrainingError as error:
            if not event.stops:
                self.broken = True
                raise
            self.stop(error)
        except BaseException as error:
            self.broken = not (isinstance(error, Exception) and callback.on_fault == "disable")
            raise

    def call_all(self, name: str) -> None:
        """Call an event that has no moment on all callbacks, in order."""
        for callback in self.trainer.callback_handler:
            if hasattr(callback, name):
                try:
                    self.deliver(name, callback, dict)
                except Exception as error:
                    error.add_note(f"raised in {type(callback).__name__}.{name}")
                    raise

    def _admits(self, name: str, event: Event, callback: BaseCallback) -> bool:
        if self.broken or (self.stopped and not event.after_stop):
            return False
        if name.endswith("_end") and (error := unwinding()) is not None and not isinstance(error, EvaluationStopped):
            return False  # in pytorch-accelerated nothing is called after an error
        return callback in self.trainer.callback_handler

    def call_hook(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        """Call a hook of the trainer; a `StopTrainingError` in it stops the training."""
        if self.stopped or self.broken:
            return None
        try:
            return hook(*arguments)
        except StopTrainingError as error:
            self.stop(error)
            return None
        except BaseException:
            self.broken = True
            raise

    def stop(self, error: StopTrainingError) -> None:
        """Stop the training now: nothing but the stop and the end of the run is told from here on.

        On several processes of a native run events are told until all know of it: others may talk to this one in them.
        """
        run, self.reason = self.run, str(error) or "StopTrainingError"
        self.asked = True
        self.stopped = self.facade or run.driver.world_size == 1
        run.stop(self.reason)
        if run.may_skip:
            run.skip_batch(self.reason)

    def agree(self) -> None:
        """Stop if any process has stopped. Every process must call this, unless an error is on its way out."""
        if self.run.driver.world_size == 1 or self.broken or unwinding() is not None:
            return
        own = self.reason if self.stopped or self.asked else None
        reasons = [reason for reason in self.run.driver.gather(own) if reason is not None]
        if reasons and not self.stopped:
            if not self.asked:
                self.stop(StopTrainingError(reasons[0]))
            self.stopped = True

    def close_for_a_stop(self) -> None:
        """A stop is taken, whoever asked for it."""
        self.stopped = True

    # -- the run history ---------------------------------------------------------------------------------

    def record_train_loss(self) -> None:
        """Note the mean loss over the epoch's samples. Every process must call this."""
        loss = self._mean_loss()
        if loss is not None:
            self.trainer.run_history.update_metric("train_loss_epoch", loss)

    def record(self, evaluation: Evaluation) -> None:
        """Note the results of an evaluation. Every process must call this."""
        if self.stopped or not (evaluation.complete or evaluation.results):
            return
        history, name = self.trainer.run_history, evaluation.name
        own = isinstance(evaluation, EvalEpoch)
        loss = self._mean_loss() if own and self.facade else evaluation.results.get(f"{name}/loss")
        if loss is not None:
            history.update_metric(evaluation.metric if isinstance(evaluation, EvalEpoch) else self._metric(evaluation), loss)
        if not (own and self.facade):
            for key, value in evaluation.results.items():
                history.update_metric(key, value)

    def _metric(self, evaluation: Evaluation) -> str:
        if not self.training:
            return "evaluation_loss"
        return f"{evaluation.name}_loss" if self.run.in_epoch else f"{evaluation.name}_loss_epoch"

    def _mean_loss(self) -> float | None:
        tracker, driver = self.trainer._loss_tracker, self.run.driver
        if driver.world_size == 1:
            return tracker.average if tracker.running_count else None
        sums = torch.tensor([tracker.total_loss, tracker.running_count], dtype=torch.float64)  # on the host
        total, count = driver.reduce(sums, "sum").tolist()
        return total / count if count else None

    # -- what the first and the last callback of a native run do for all ------------------------------------

    def open_epoch(self) -> None:
        """An epoch begins."""
        self.in_epoch = True
        if not self.run.progress.batch_in_epoch:  # else it goes on where a checkpoint was written
            self.trainer._loss_tracker.reset()

    def close_steps(self) -> None:
        """The steps of an epoch are over: tell it once, before an evaluation at the end of the epoch."""
        if self.in_epoch and not self.run.in_epoch and not self.stopped:
            self.in_epoch = False
            self.record_train_loss()
            self.run.fire(Events.on_train_epoch_end)

    def close_epoch(self) -> None:
        """All is done that belongs to an epoch."""
        if not self.stopped and not self.broken and unwinding() is None:
            self.run.fire(Events.on_training_run_epoch_end)
            if not self.stopped:
                self.trainer.run_history._increment_epoch()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(self, checkpoint: Any) -> None:
        """Add to a checkpoint what is this dialect's own."""
        checkpoint.extra[STATE] = {"in_epoch": self.in_epoch, **state_of(self.trainer)}

    def load(self, loaded: Any) -> None:
        """Take back what `save` added."""
        state = loaded.state.get("extra", {}).get(STATE)
        if state is not None:
            self.in_epoch = state["in_epoch"]
            restore_state(self.trainer, state)
