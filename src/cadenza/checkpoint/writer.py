"""Save a run: copy it to the host, hand the copy to a thread that writes it, and report the result at a step boundary."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.attempts import Attempts, Save
from cadenza.checkpoint.retention import Retention
from cadenza.checkpoint.store import Saved, Store
from cadenza.engine.agreement import together
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.run import Run


class CheckpointWriter:
    """Writes the checkpoints of one `Checkpoint` in one run. Every rank makes one, and calls its methods.

    Results of writes come from another thread. `take_results` applies them: at the next step boundary, or before the next save.

    Args:
        run: The run to save.
        store: The store to write to.
        retention: Decides what is kept after a write.
        who: The name of the callback, for decisions.
        background: Write in a thread.
        strict: Raise the error of a failed write. Otherwise the write is repeated.
        weights_only: Write the model alone.
        grace_s: The seconds between a signal and the end of the process; None if unknown.
    """

    def __init__(
        self,
        run: Run,
        store: Store,
        retention: Retention,
        who: str,
        *,
        background: bool = True,
        strict: bool = False,
        weights_only: bool = False,
        grace_s: float | None = None,
    ) -> None:
        self.run, self.store, self.retention, self.who = run, store, retention, who
        self.strict, self.weights_only = strict, weights_only
        self._together = run.driver.shards
        """Whether all ranks write. Otherwise the main process does."""
        self._saved_at: Counters | None = None
        """The counters of the newest checkpoint, written or being written; None if its write has failed."""
        self._fixed: dict[str, Any] = {}
        self.attempts = Attempts(
            store,
            run.sync_files,
            self._prune,
            lambda: run.at_next_border(self.take_results),
            background=background,
            repeats=not strict,
            grace_s=grace_s,
            rank=run.driver.rank,
            gather=run.driver.aside() if self._together else None,
        )

    def begin(self) -> None:
        """Start, after a restore: check that the run can be saved, and delete what a killed process left unfinished.

        Raises:
            StateError: The state of a callback cannot be saved; the message names the callback.
        """
        run = self.run
        snapshot.check_states(run)  # now, not when the first checkpoint is due
        self._fixed = snapshot.fixed_facts(run)
        if run.is_main:
            self.store.sweep()
        if any(kept.name for kept in self.retention.kept):
            names = [saved.name for saved in self.store.saved()] if run.is_main else None
            for warning in self.retention.forget_missing(run.driver.broadcast(names)):
                run.warn(warning)
        # A checkpoint of a suspended moment holds its beginning: the rest is to be saved, although no counter moves.
        self._saved_at = run.progress.now() if run.progress.step and run.requests.suspended is None else None

    def save(self, reason: str) -> None:
        """Save the run, unless its newest checkpoint holds the present state.

        Raises:
            OSError: A write has failed, and `strict`.
        """
        run = self.run
        self.take_results()
        there = self._saved_at == run.progress.now() and run.at_border and not self.retention.pending
        if together(run):  # only the main process knows whether a write has failed
            there = run.driver.broadcast(there)
        if there:
            return
        if self._together and run.driver.world_size > 1 and not together(run):
            why, data = "after an error a rank cannot count on the others' shards", {"step": run.progress.step, "error": None}
            run.decide("not saved", f"step {run.progress.step}: {why}", data=data)
            return
        with run.hooks.during("saving"):
            self._save(reason)
            self.take_results()

    def finish(self) -> None:
        """Return when nothing is being written; repeat a failed write for the last time.

        Raises:
            OSError: The write has failed, and `strict`.
        """
        with self.run.hooks.during("saving"):
            self.attempts.stop()
            if not self._together or together(self.run):
                self.attempts.finish()
            self.take_results()

    @property
    def lost(self) -> str | None:
        """The reason why the last checkpoint of the run is lost; None if it is written."""
        if (save := self.attempts.failed) is None:
            return None
        return (
            f"the run ended, and its last checkpoint, of step {save.at.step}, could not be written to {self.store.files} in "
            f"{save.attempts} attempts: {save.error!r}. Free space there; then fit(resume='auto') continues at the newest "
            "written checkpoint. Or keep the weights with save_weights(model, path) before this process ends."
        )

    def take_results(self) -> None:
        """Apply the results of writes: which checkpoints are the best, decisions, warnings.

        Raises:
            OSError: A write has failed, and `strict`.
        """
        while self.attempts.results:
            save, saved, pruned = self.attempts.results.popleft()
            if isinstance(saved, Exception):
                self._saved_at = None
                self.retention.restore(save.before)
                self._report_failure(save, saved)
                continue
            if save.error is not None:  # a later attempt was successful
                self._saved_at = save.at
                self.retention.restore(save.after)
            if self.run.is_main:
                self._report(save, saved, pruned)

    def _save(self, reason: str) -> None:
        run = self.run
        if self.attempts.busy:
            run.decide("waited", "the last checkpoint is still being written", who=self.who)
        self.attempts.stop()  # the save that begins is newer
        self.take_results()
        before = self.retention.kept
        self._choose_best()
        taken = snapshot.take(run, reason, self._fixed)
        if run.is_main or self._together:
            content = taken.content(weights_only=self.weights_only, averaged=self.retention.averaged(run.progress.step))
            self._saved_at = run.progress.now()
            self.attempts.start(Save(content, self._saved_at, before, self.retention.kept, run.requests.signalled_at))

    def _choose_best(self) -> None:
        """Make the checkpoint that is about to be written the best, if a value got better and the weights are finite."""
        run, pending = self.run, self.retention.pending
        if together(run):
            pending = run.driver.broadcast(pending)
        if not pending:
            return
        finite = (run.is_main or self._together) and snapshot.is_finite(run)
        name = f"step-{run.progress.step:08d}"
        with suppress(Exception):  # if the folder cannot be read, the write reports the error
            name = self.store.next_name(run.progress.step).name
        self.retention.assign(name, usable=finite and run.is_main)

    def _prune(self, saved: Saved) -> list[str]:
        return self.retention.prune(self.store, saved) if self.run.is_main else []

    def _report(self, save: Save, saved: Saved, pruned: list[str] | Exception) -> None:
        decide, reason = self.run.decide, save.content.facts["reason"]
        again = f", at attempt {save.attempts}" if save.attempts > 1 else ""
        best = [
            one.monitor.best_data(value=kept.value, step=saved.step)
            for one, kept in zip(self.retention.best, save.after, strict=True)
            if kept.name == saved.name
        ]
        data = {"checkpoint": saved.name, "step": saved.step, "attempts": save.attempts, "reason": reason, "best": best}
        decide("saved", f"{saved.name}: {reason}{again}", who=self.who, data=data)
        if isinstance(pruned, Exception):
            decide("not pruned", repr(pruned), who=self.who, data={"error": repr(pruned)})
        elif pruned:
            decide("pruned", ", ".join(pruned), who=self.who, data={"checkpoints": pruned})

    def _report_failure(self, save: Save, error: Exception) -> None:
        step, retry = save.at.step, "" if self.strict else ". It is tried again until the next save"
        self.run.decide("not saved", f"step {step}: {error!r}", who=self.who, data={"step": step, "error": repr(error)})
        self.run.warn(f"the checkpoint of step {step} could not be written, and the training goes on: {error!r}{retry}")
        if self.strict:
            raise error
