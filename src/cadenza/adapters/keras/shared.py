"""What all Keras callbacks of a run have in common: the view, the epoch, and the logs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cadenza.adapters.foreign import foreign_callbacks
from cadenza.adapters.keras.logs import Logs, Means
from cadenza.adapters.keras.model_view import ModelView, model_view
from cadenza.adapters.keras.optimizer_view import rates_kept
from cadenza.engine.prediction import Prediction
from cadenza.engine.session import Session, session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.loading.loaders import length_of
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.outputs import Outputs

KEY = "keras"
POSITION = Progress.position_reader()
_VALIDATION = ("val", "eval", "valid", "validation")
"""The names of evaluations of which the results get the prefix ``val_``: the first of these that the run has."""


class KerasRun:
    """The state that the adapters of one run share.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run: Run = run
        self.session: Session = session_of(run)
        self.scene: Any = hooks_of(run).scene
        self.epoch: int = run.progress.epoch
        """The current epoch, from 0."""
        self.seen: int = 0
        """The number of batches that are done in this epoch."""
        self.inside: bool = False
        """Whether the last batch is inside an accumulation window: its end is called before the update."""
        self.means: Means = Means()
        self.skipped: Means = Means()
        """The means of batches without an update, for the logs of an epoch that has no others."""
        self.logs: dict[str, Any] = {}
        """The running means after the last batch."""
        self.epoch_logs: dict[str, Any] = {}
        """The logs of the last epoch: one dict for all callbacks, to which they may add values."""
        self.results: dict[str, Any] = {}
        """The results of evaluations in this epoch, by Keras's names."""
        self.tests: bool = False
        """Whether the current evaluation is no prediction."""
        self.test_batch: int = 0
        self.test_means: Means = Means()
        self.test_logs: dict[str, Any] = {}
        self.view: ModelView = model_view(run, lambda: [*self.means.totals])
        self.view._start_epoch = self._start_at
        callbacks: list[Any] = foreign_callbacks(run, KEY)
        self.first: Any = next((one for one in callbacks if one.tracks), None)
        """The callback of which the listeners act for all of them."""
        self.wants_logs: bool = any(one.ends_batches for one in callbacks)

    @classmethod
    def of(cls, run: Run) -> KerasRun:
        """Return that of a run."""
        adapters = session_of(run).adapters
        if KEY not in adapters:
            adapters[KEY] = cls(run)
        found: KerasRun = adapters[KEY]
        return found

    def params(self, evaluation: Evaluation | None = None) -> dict[str, Any]:
        """Return ``params`` of the callbacks. Without a limit of epochs, ``epochs`` follows from that of the steps."""
        if evaluation is not None:
            return {"verbose": 1, "epochs": 1, "steps": length_of(evaluation.loader)}
        progress = self.run.progress
        epochs, batches = progress.max_epochs, progress.batches_per_epoch
        if epochs is None:
            steps_per_epoch = math.ceil(batches / self.session.accumulate) if batches else 1
            epochs = sys.maxsize if progress.max_steps is None else math.ceil(progress.max_steps / steps_per_epoch)
        return {"verbose": 1, "epochs": epochs, "steps": batches}

    # -- training: called by the listeners of the first callback ------------------------------------------

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue one."""
        progress = self.run.progress
        self.epoch, self.seen, self.inside, self.logs = progress.epoch, progress.batch_in_epoch, False, {}
        if not progress.resumed_in_epoch:
            self.means, self.skipped, self.results = Means(), Means(), {}

    def add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        """Add the numbers of a batch to the means. This is part of each step, so it calls little."""
        if self.scene.unwinding is not None:
            return
        self.seen += 1
        step = self.session.step
        if outputs:
            skips, means = step.skipping, self.skipped if step.skipping else self.means
            # the window has the loss without its graph, but not that of a skipped batch
            own = dict(outputs) if skips else {**outputs, "loss": step.window.losses[-1]}
            means.add(own, batch, self.session.cursor.source.samples)
            if self.wants_logs and not (skips and self.means.totals):
                self.logs = logs = Logs(means.totals)
                logs.sums = dict(means.totals), dict(means.weights)
        window, (_, _, _, batches) = step.window, POSITION(self.run.progress)
        self.inside = window.seen < window.size and self.seen != batches

    def end_epoch(self) -> None:
        """Make the logs of an epoch that ended: the means over all ranks, then the results of evaluations in it."""
        if not self.closes():
            return
        own, driver = self.means if self.means.totals else self.skipped, self.session.driver
        means = own
        if driver.world_size > 1:
            means = Means()
            for one in driver.gather(own.state_dict()):
                means.add_all(one, self.session.device)
        self.epoch_logs = {**means.logs(), **self.results}

    def closes(self) -> bool:
        """Return whether a section ends well: not by an error or a signal, after which the run continues later."""
        outcome = self.run.outcome
        return self.scene.unwinding is None and (outcome is None or outcome.kind in ("finished", "stopped"))

    # -- evaluation ---------------------------------------------------------------------------------------

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """Begin an evaluation, or a prediction."""
        self.tests = not isinstance(evaluation, Prediction)
        self.test_means, self.test_logs, self.test_batch = Means(), {}, 0

    def add_test_batch(self, evaluation: Evaluation, batch: Any, outputs: Outputs) -> None:
        """Add the numbers of a batch to the means of an evaluation, once for all callbacks."""
        if self.test_batch != evaluation.batch:
            self.test_batch, means = evaluation.batch, self.test_means
            means.add(outputs, batch, evaluation.samples)
            self.test_logs = logs = Logs(means.totals)
            logs.sums = dict(means.totals), dict(means.weights)

    def add_results(self, evaluation: Evaluation) -> None:
        """Take the results of an evaluation into the logs of the epoch."""
        if evaluation.complete and evaluation.name in self.run.evaluations:
            prefix = "val" if evaluation.name == self._validation() else evaluation.name
            self.results.update({f"{prefix}_{name}": value for name, value in plain_results(evaluation).items()})

    def _validation(self) -> str:
        names = self.run.evaluations
        return next((name for name in _VALIDATION if name in names), next(iter(names)))

    # -- resume -------------------------------------------------------------------------------------------

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Return a context for an event that the checkpoint has behind it: weights and learning rates stay."""
        with rates_kept(self.run):
            self.view._repeats = True
            try:
                yield
            finally:
                self.view._repeats = False

    def save(self, checkpoint: Any) -> None:
        """Add the means of the epoch to a checkpoint. Every rank must call this."""
        own = self.means.state_dict()
        ranks = self.session.driver.gather(own) if self.session.sync.together else [own]
        logs = {name: value for name, value in self.epoch_logs.items() if isinstance(value, int | float | str)}
        checkpoint.extra[KEY] = {"epoch": self.epoch, "ranks": ranks, "logs": logs, "results": dict(self.results)}

    def load(self, loaded: Any) -> None:
        """Restore what `save` added. On another number of ranks, the first one continues the means of all."""
        state: Mapping[str, Any] | None = loaded.state.get("extra", {}).get(KEY)
        if state is None:
            return
        driver, ranks = self.session.driver, state["ranks"]
        same = len(ranks) == driver.world_size
        self.means = Means()
        for one in [ranks[driver.rank]] if same else ranks if driver.rank == 0 else []:
            self.means.add_all(one, self.session.device)
        self.epoch, self.epoch_logs, self.results = state["epoch"], dict(state["logs"]), dict(state["results"])

    def _start_at(self, epoch: int) -> None:
        """Begin the run in a later epoch, for Keras's BackupAndRestore."""
        progress = self.session.progress
        if not progress.step and epoch:
            progress.begin(replace(progress.now(), epoch=epoch), progress.batches_per_epoch)


def plain_results(evaluation: Evaluation) -> dict[str, Any]:
    """Return the results without the name of the evaluation, as in the logs of ``on_test_end``."""
    return {name.removeprefix(f"{evaluation.name}/"): value for name, value in evaluation.results.items()}
