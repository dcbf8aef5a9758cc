"""State shared by all Keras callbacks of a run: view, epoch, logs and stop request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import proxy, ref

from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.adapter.attributes import plain_attributes, put_back
from cadenza.compat.adapter.foreign import callbacks_of, foreign_callbacks
from cadenza.compat.adapter.view import OfRun
from cadenza.compat.keras import classes
from cadenza.compat.keras.inference import validation_of
from cadenza.compat.keras.keras_model_view import model_view
from cadenza.compat.keras.logs import Logs, Means
from cadenza.compat.keras.model_view import ModelView
from cadenza.compat.keras.optimizer_view import rates_kept
from cadenza.compat.keras.ranks import agreed_logs, check_equal
from cadenza.engine.evaluation import Prediction
from cadenza.engine.session import session_of, weakly
from cadenza.engine.step_state import Cursor, StepState
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Every
from cadenza.loading.loaders import length_of
from cadenza.status.decisions import COMPLETE
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.decisions import Decision
    from cadenza.status.outputs import Outputs


KEY = "keras"
POSITION = Progress.position_reader()
_BEFORE_A_BATCH = (Callback.on_setup, Callback.on_fit_start, Callback.on_epoch_start, Callback.on_batch_start)
"""Hooks in which ``stop_training`` takes effect only after the next batch, when Keras reads it."""


class KerasRun(OfRun):
    """The state shared by the adapters of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        session = session_of(run)
        self.step: StepState = session.step
        self.cursor: Cursor = session.cursor
        self.progress: Progress = session.progress
        self.scene: Any = hooks_of(run).scene
        self.epoch: int = run.progress.epoch
        """The current epoch, from 0."""
        self.seen: int = 0
        """The number of completed batches in this epoch."""
        self.inside: bool = False
        """Whether the last batch is inside an accumulation window, so that its end event precedes the update."""
        self.means: Means = Means()
        self.skipped: Means = Means()
        """The means of batches without an update, for the logs of an epoch without updates."""
        self.logs: dict[str, Any] = {}
        """The running means after the last batch."""
        self.epoch_logs: dict[str, Any] = {}
        """The logs of the last epoch: one dict for all callbacks, to which they may add values."""
        self.results: dict[str, Any] = {}
        """The results of evaluations in this epoch, by Keras's names."""
        self.tests: bool = False
        """Whether the current evaluation is not a prediction."""
        self.test_batch: int = 0
        self.test_means: Means = Means()
        self.test_logs: dict[str, Any] = {}
        self.view: ModelView = model_view(run, weakly(self.newest_means))
        self.view._start_epoch = weakly(self._start_at)
        self.view._request_stop, self.view._withdraw_stop = weakly(self.request_stop), weakly(self.withdraw_stop)
        self.stopper: str | None = None
        """The callback that set ``stop_training``, until the request is made."""
        self._stop_decision: Decision | None = None
        self._agreed_names: list[str] | None = None
        self._agreed_means: Means | None = None
        self._recorded_epoch: int | None = None
        self.cut: bool = False
        """Whether the epoch was cut short, so that its end event is called at the end of the run."""
        callbacks: list[Any] = foreign_callbacks(run, KEY)
        self.first: Callable[[], Any] = next((ref(callback) for callback in callbacks if callback.tracks), lambda: None)
        """Returns the callback with the listeners that act for all callbacks."""
        self.recorded: History = History(callbacks, self.view)
        self.wants_logs: bool = any(callback.ends_batches for callback in callbacks)
        self.several: bool = session.driver.world_size > 1

    @classmethod
    def of(cls, run: Run) -> KerasRun:
        """Return the shared state of a run."""
        adapters = session_of(run).adapters
        if KEY not in adapters:
            adapters[KEY] = cls(run)
        found: KerasRun = adapters[KEY]
        return found

    def params(self, evaluation: Evaluation | None = None) -> dict[str, Any]:
        """Return ``params`` of the callbacks. Without a limit of epochs, ``epochs`` is derived from the limit of steps."""
        if evaluation is not None:
            return {"verbose": 1, "epochs": 1, "steps": length_of(evaluation.loader)}
        progress = self.progress
        epochs, batches = progress.max_epochs, progress.batches_per_epoch
        if epochs is None:
            steps_per_epoch = math.ceil(batches / self.session.accumulate) if batches else 1
            epochs = sys.maxsize if progress.max_steps is None else math.ceil(progress.max_steps / steps_per_epoch)
        return {"verbose": 1, "epochs": epochs, "steps": batches}

    def newest_means(self) -> dict[str, Any]:
        """Return the means of the epoch."""
        return dict(self.means.logs())

    # -- training: called by the listeners of the first callback ------------------------------------------

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue one."""
        progress = self.progress
        self.epoch, self.seen, self.inside, self.logs = progress.epoch, progress.batch_in_epoch, False, {}
        self._agreed_names = None
        self.record_epoch()
        if not progress.resumed_in_epoch:
            self.means, self.skipped, self.results = Means(), Means(), {}

    def add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        """Add the numbers of a batch to the means. Called in each step, so it makes few calls.

        If a callback reads them after each batch, all ranks get the means over all ranks.
        """
        if self.scene.unwinding is not None:
            return
        self.seen += 1
        step = self.step
        if outputs:
            skips = step.skipping or step.dropped  # same as `discarded`, without a call in each batch
            means = self.skipped if skips else self.means
            # the window has the loss without its graph, but not that of a skipped batch
            own = dict(outputs) if skips else {**outputs, "loss": step.window.losses[-1]}
            means.add(own, batch, self.cursor.source.samples)
            if self.wants_logs and not self.several and not (skips and self.means.totals):
                self.logs = logs = Logs(means.totals)
                logs.sums = dict(means.totals), dict(means.weights)
        if self.wants_logs and self.several:
            means = self.means if self.means.totals else self.skipped
            names = self._agreed_names if means is self._agreed_means else None
            self._agreed_means, (self._agreed_names, self.logs) = means, agreed_logs(self.session, means, names)
        if self.stopper is not None and self.view._stops:
            self._stop()
        window, (_, _, _, batches) = step.window, POSITION(self.progress)
        self.inside = window.seen < window.size and self.seen != batches

    def end_epoch(self) -> None:
        """Build the logs of a completed epoch: the means over all ranks, then the results of its evaluations."""
        if not self.closes():
            return
        own = means = self.means if self.means.totals else self.skipped
        if self.several:
            check_equal(self.session, self.view._setters)
            means = Means()
            for state in self.session.driver.gather_data(own.state_dict()):
                means.add_all(state, self.session.driver.device)
        self.epoch_logs = {**means.logs(), **self.results}
        self._recorded_epoch = self.epoch
        self.cut = self.progress.epoch == self.epoch

    def end_cut_epoch(self) -> None:
        """Call ``on_epoch_end`` for an epoch that was cut short, after the last checkpoint is written.

        A run resumed from that checkpoint finishes the epoch and then calls the event, so the checkpoint must precede this
        call.
        """
        if self.cut and self.closes():
            self.cut, hooks = False, hooks_of(self.run)
            ends = [hook for hook in hooks.by_moment[Callback.on_epoch_end] if getattr(hook, "event", "") == "on_epoch_end"]
            hooks.call(ends, self.run)
        self.record_epoch()

    def record_epoch(self) -> None:
        """Add the logs of an epoch to `model.history` after all callbacks, as Keras does."""
        epoch, self._recorded_epoch = self._recorded_epoch, None
        if epoch is not None:
            self.recorded.add(epoch, self.epoch_logs)

    def closes(self) -> bool:
        """Return whether a section ended without an error or a signal, after which the run may be resumed."""
        outcome = self.run.outcome
        return self.scene.unwinding is None and (outcome is None or outcome.kind in COMPLETE)

    # -- stop_training ------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Request the end of the run now, or after the next batch, when Keras reads ``stop_training``."""
        listener = self.scene.listener
        self.stopper = "the script" if listener is None else listener.owner
        if listener is not None and listener.moment not in _BEFORE_A_BATCH:
            self._stop()

    def _stop(self) -> None:
        who, self.stopper = self.stopper, None
        reason = f"{who} set model.stop_training"
        self._stop_decision = self.session.decide("stopped", reason, who=who, data={"system": KEY})
        self.session.sync.requests.ask_stop(self._stop_decision)

    def withdraw_stop(self) -> bool:
        """Withdraw the request on ``stop_training = False`` in the same hook; return False if it is too late."""
        requests = self.session.sync.requests
        if self.stopper is None:
            if self.run.outcome is not None or requests.stop is None or requests.stop is not self._stop_decision:
                return False
            requests.withdraw_stop()
            self.session.decide("stop withdrawn", "model.stop_training was set to False")
        self.stopper = None
        return True

    def evaluate_cut_epoch(self) -> None:
        """Evaluate in an epoch that ``stop_training`` cut short, as Keras does: with each `Evaluate` that is due at its end."""
        stop = self.session.sync.requests.stop
        if stop is None or stop.data.get("system") != KEY or self.progress.epoch > self.epoch or not self.closes():
            return
        for callback in callbacks_of(self.run, Evaluate):
            every = callback.every
            if type(every) is Every and every.only_epochs and (self.epoch + 1) % int(every.count) == 0:
                callback.evaluate(self.run)

    # -- evaluation ---------------------------------------------------------------------------------------

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """Begin an evaluation, or a prediction."""
        self.tests = not isinstance(evaluation, Prediction)
        self.test_means, self.test_logs, self.test_batch = Means(), {}, 0

    def add_test_batch(self, evaluation: Evaluation, batch: Any, outputs: Outputs) -> None:
        """Add the numbers of a batch to the evaluation's means, once for all callbacks."""
        if self.test_batch != evaluation.batch:
            self.test_batch, means = evaluation.batch, self.test_means
            means.add(outputs, batch, evaluation.samples)
            self.test_logs = logs = Logs(means.totals)
            logs.sums = dict(means.totals), dict(means.weights)

    def add_results(self, evaluation: Evaluation) -> None:
        """Add the results of an evaluation to the logs of the epoch."""
        if evaluation.complete and evaluation.name in self.run.evaluations:
            prefix = "val" if evaluation is validation_of(self.run) else evaluation.name
            self.results.update({f"{prefix}_{name}": value for name, value in plain_results(evaluation).items()})

    # -- resume -------------------------------------------------------------------------------------------

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Return a context for repeating an event that preceded the checkpoint. It keeps weights and learning rates."""
        with rates_kept(self.run):
            self.view._repeats = True
            try:
                yield
            finally:
                self.view._repeats = False

    def save(self, checkpoint: Any) -> None:
        """Add the means of the epoch to a checkpoint. Every rank must call this."""
        own = self.means.state_dict()
        ranks = self.session.driver.gather_data(own) if self.session.sync.together else [own]
        logs = {name: value for name, value in self.epoch_logs.items() if isinstance(value, int | float | str)}
        self.record_epoch()
        state = {"epoch": self.epoch, "ranks": ranks, "logs": logs, "results": dict(self.results)}
        checkpoint.extra[KEY] = {**state, "history": self.recorded.state_dict()}

    def load(self, loaded: Any) -> None:
        """Restore what `save` added. If the number of ranks differs, the first rank continues the means of all."""
        state: Mapping[str, Any] | None = loaded.state.get("extra", {}).get(KEY)
        if state is None:
            return
        driver, ranks = self.session.driver, state["ranks"]
        same = len(ranks) == driver.data_world_size
        self.means = Means()
        for means in [ranks[driver.data_rank]] if same else ranks if driver.rank == 0 else []:
            self.means.add_all(means, self.session.driver.device)
        self.epoch, self.epoch_logs, self.results = state["epoch"], dict(state["logs"]), dict(state["results"])
        self.recorded.load_state_dict(state.get("history", {}))

    def _start_at(self, epoch: int) -> None:
        """Begin the run in a later epoch, for Keras's BackupAndRestore."""
        progress = self.progress
        if not progress.step and epoch:
            progress.begin(replace(progress.now(), epoch=epoch), progress.batches_per_epoch)


def plain_results(evaluation: Evaluation) -> dict[str, Any]:
    """Return the results without the name of the evaluation, as in the logs of ``on_test_end``."""
    return {name.removeprefix(f"{evaluation.name}/"): value for name, value in evaluation.results.items()}


class History:
    """The run's `keras.callbacks.History` in ``model.history``, used if the list has none.

    Args:
        callbacks: The adapters of the run.
        view: The ``model`` of the callbacks.
    """

    def __init__(self, callbacks: Iterable[Any], view: Any) -> None:
        own = [callback.callback for callback in callbacks if "History" in classes.names(callback.callback)]
        self.added: Any = None
        if own:
            view._history = ref(own[-1])  # the view is its model
            return
        package = next((sys.modules.get(callback.base.__module__.partition(".")[0]) for callback in callbacks), None)
        if (kind := getattr(getattr(package, "callbacks", None), "History", None)) is not None:
            self.added = view.history = kind()
            self.added.set_model(proxy(view))
            self.added.on_train_begin()

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Add the logs of an epoch."""
        if self.added is not None:
            self.added.on_epoch_end(epoch, dict(logs))

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs and their logs."""
        kept = {} if self.added is None else plain_attributes(self.added)
        return {name: kept[name] for name in ("epoch", "history") if name in kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.added is not None:
            put_back(state, self.added)
