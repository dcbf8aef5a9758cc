"""The conductor: the first Lightning adapter of a run, which fires Lightning's hooks for all adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.adapter.requests import evaluate_now
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.compat.lightning.trainer_view import TrainerView, trainer_view
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of, unwinding
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback, Moment
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

Ends = Sequence[Moment]

STARTS: dict[str, tuple[Moment, Moment]] = {
    "validate": (LightningMoments.on_validation_start, LightningMoments.on_validation_epoch_start),
    "test": (LightningMoments.on_test_start, LightningMoments.on_test_epoch_start),
    "predict": (LightningMoments.on_predict_start, LightningMoments.on_predict_epoch_start),
}
ENDS: dict[str, tuple[Moment, Moment]] = {
    "validate": (LightningMoments.on_validation_epoch_end, LightningMoments.on_validation_end),
    "test": (LightningMoments.on_test_epoch_end, LightningMoments.on_test_end),
    "predict": (LightningMoments.on_predict_epoch_end, LightningMoments.on_predict_end),
}


class Conductor(BaseCallback):
    """A callback that can fire Lightning's hooks. The first one in a run does.

    Lightning calls one hook of all callbacks before the next hook of the first one. A native hook that maps to two Lightning
    hooks, such as ``on_eval_start``, cannot do that, so one callback fires `LightningMoments` in Lightning's order. They all
    run after the evaluations of the list, because ``on_train_epoch_end`` follows the validation of its epoch.
    """

    after: Relation = (Phase.EVALUATE, Phase.SCHEDULE)

    def conducts(self) -> bool:
        """Return whether it has listeners and can therefore be the conductor."""
        return True

    def take(self, run: Run, view: TrainerView) -> None:
        """Prepare for a run, before any hook. Override this."""

    def owes(self, run: Run) -> Listener | None:
        """Return the listener with a pending ``on_train_batch_end`` of a completed step. Override this."""
        return None

    def conducting(self) -> list[Listener]:
        """Return the listeners of a conductor. They must come before the other listeners of the callback."""
        listeners = [
            Listener(Callback.on_setup, self._open),
            Listener(Callback.on_sanity_start, self._start_sanity),
            Listener(Callback.on_sanity_end, self._end_sanity),
            Listener(Callback.on_fit_start, self._begin_fit),
            Listener(Callback.on_epoch_start, self._start_epoch),
            Listener(Callback.on_eval_start, self._start_evaluation),
            Listener(Callback.on_eval_end, self._end_evaluation),
            Listener(Callback.on_epoch_end, self._end_epoch),
            Listener(Callback.on_stop, self._evaluate_once_more),
            Listener(Callback.on_save, self._save_metrics),
            Listener(Callback.on_load, self._load_metrics),
            Listener(Callback.on_exception, self._interrupt),
            Listener(Callback.on_fit_end, self._end_fit),
        ]
        for listener in listeners:
            listener.shared = True
        return inner(listeners)

    # -- called in every adapter; the first one acts ------------------------------------------------

    def _view(self, run: Run) -> TrainerView | None:
        """Return the view if this is the conductor."""
        view = trainer_view(run)
        if view._conductor is None:
            able = _able(run)
            view._conductor = ref(able[0])
            view._names = [hooks_of(run).name_of(listener) for listener in able]
            for listener in able:
                listener.take(run, view)
        return view if view._conductor() is self else None

    def _open(self, run: Run) -> None:
        if view := self._view(run):
            view._stage = "train"
            hooks_of(run).fire(LightningMoments.on_stage_setup, run, "fit")

    def _begin_fit(self, run: Run) -> None:
        if (view := self._view(run)) and not view._begun:
            view._begun = True
            self._start(run, LightningMoments.on_fit_begin)

    @staticmethod
    def _start(run: Run, moment: Moment) -> None:
        """Fire a hook at the start of a run.

        In a resumed run, callbacks freeze parameters again, so keep the restored flags.
        """
        session = session_of(run)
        continues = run.progress.batch > 0
        with session.module_flags.held(session.decide, "the trainer") if continues else nullcontext():
            session.hooks.fire(moment, run)

    def _start_sanity(self, run: Run, evaluation: Evaluation) -> None:
        if view := self._view(run):
            self._begin_fit(run)
            view._stage, view._evaluation = "sanity_check", evaluation
            hooks_of(run).fire(LightningMoments.on_sanity_check_start, run)

    def _end_sanity(self, run: Run, evaluation: Evaluation) -> None:
        if view := self._view(run):
            view._broken |= unwinding(run) is not None
            if not view._broken:
                hooks_of(run).fire(LightningMoments.on_sanity_check_end, run)
                view._stage, view._evaluation = "train", None

    def _start_epoch(self, run: Run) -> None:
        if view := self._view(run):
            view._epoch = run.progress.epoch
            if not view._trained:
                view._trained = True
                self._start(run, LightningMoments.on_train_start)

    def _start_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if view := self._view(run):
            hooks = hooks_of(run)
            # An evaluation at the end of a step comes after the last batch of the step.
            hooks.call([late for listener in _able(run) if (late := listener.owes(run)) is not None], run)
            view._stage = view._stage_of(evaluation)
            view._evaluation = evaluation
            view._metrics.sums = {}
            if not view._fits:
                hooks.fire(LightningMoments.on_stage_setup, run, view._stage)
            for moment in STARTS[view._stage]:
                hooks.fire(moment, run)

    def _end_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        view = self._view(run)
        if view is None:
            return
        hooks = hooks_of(run)
        error = unwinding(run)
        if error is not None and not view._fits:
            self._pass_on(run, view, error)
        view._broken |= error is not None
        if not view._broken:
            for moment in ENDS[view._stage][int(getattr(evaluation, "ended", False)) :]:
                hooks.fire(moment, run)
            if not view._fits:
                hooks.fire(LightningMoments.on_stage_teardown, run, view._stage)
            view._stage, view._evaluation = "train" if view._fits else view._stage, None
            view._evaluated = run.progress.step

    def _evaluate_once_more(self, run: Run, reason: str) -> None:
        """Evaluate when a Lightning callback stops the run inside an epoch, as Lightning does."""
        view, progress = self._view(run), run.progress
        if view is None or session_of(run).sync.requests.signal is not None:
            return
        cut = 0 < progress.batch_in_epoch != progress.batches_per_epoch and not session_of(run).cursor.exhausted
        due = cut and view._evaluated != progress.step and view.fit_loop.epoch_loop._should_check_val_epoch()
        if run.driver.any_rank(view._asked) and due:
            evaluate_now(run)

    def _end_epoch(self, run: Run) -> None:
        view = self._view(run)
        # a run ended by a signal inside an epoch is resumed later, so its epoch has not ended
        left = run.progress.batch_in_epoch and session_of(run).sync.requests.signal is not None
        if view and not left and not view._broken and unwinding(run) is None:
            if view._schedulers is not None:
                view._schedulers.step(view.current_epoch)
            hooks_of(run).fire(LightningMoments.on_train_epoch_end, run)
            hooks_of(run).fire(LightningMoments.on_train_epoch_end_monitoring, run)

    def _save_metrics(self, run: Run, checkpoint: Any) -> None:
        if view := self._view(run):
            checkpoint.extra["lightning"] = {"callback_metrics": dict(view.callback_metrics)}

    def _load_metrics(self, run: Run, loaded: Any) -> None:
        if view := self._view(run):
            view._metrics.values.update(loaded.state.get("extra", {}).get("lightning", {}).get("callback_metrics", {}))

    def _interrupt(self, run: Run, error: BaseException) -> None:
        if view := self._view(run):
            view._interrupted = True

    def _end_fit(self, run: Run) -> None:
        view = self._view(run)
        if view is None or unwinding(run) is not None or session_of(run).sync.requests.signal is not None:
            return  # Lightning calls no end hooks after an error or if the run will be resumed
        hooks, view._over = hooks_of(run), True
        try:
            if view._trained:
                hooks.fire(LightningMoments.on_train_end, run)
            hooks.fire(LightningMoments.on_fit_finish, run)
            hooks.fire(LightningMoments.on_stage_teardown, run, "fit")
        except BaseException as error:  # on_exception was fired before on_fit_end
            self._pass_on(run, view, error)
            raise

    @staticmethod
    def _pass_on(run: Run, view: TrainerView, error: BaseException) -> None:
        """Call ``on_exception`` only on Lightning callbacks, for an error after which it is not fired."""
        hooks = hooks_of(run)
        view._interrupted = view._broken = True
        listeners = hooks.by_moment.get(Callback.on_exception, ())
        with hooks.unwinding_of(error):
            hooks.call([listener for listener in listeners if listener.owner in view._names], run, error)


def _able(run: Run) -> list[Conductor]:
    """Return the callbacks of a run that can be the conductor."""
    return [callback for callback in callbacks_of(run, Conductor) if callback.conducts()]
