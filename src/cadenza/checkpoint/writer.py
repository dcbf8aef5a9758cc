"""Save a run: copy it to the host, hand the copy to a thread that writes it, and report the result at a step boundary."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.attempts import Attempts, Save
from cadenza.checkpoint.retention import Retention
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.link_names import LAST
from cadenza.checkpoint.store.links import set_links
from cadenza.checkpoint.store.manifest import best_text
from cadenza.engine.session import Session
from cadenza.status.progress import Counters


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
        session: Session,
        store: Store,
        retention: Retention,
        who: str,
        *,
        background: bool = True,
        strict: bool = False,
        weights_only: bool = False,
        grace_s: float | None = None,
    ) -> None:
        self.session: Session = session
        self.store: Store = store
        self.retention: Retention = retention
        self.who: str = who
        self.strict: bool = strict
        self.weights_only: bool = weights_only
        self._together = session.driver.shards
        """Whether all ranks write. Otherwise the main process does."""
        self._saved_at: Counters | None = None
        """The counters of the newest checkpoint, written or being written; None if its write has failed."""
        self._fixed: dict[str, Any] = {}
        self.attempts: Attempts = Attempts(
            store,
            session.files.sync if session.files is not None else None,
            self._prune,
            lambda: session.after_step(self.take_results),
            background=background,
            repeats=not strict,
            grace_s=grace_s,
            rank=session.driver.rank,
            gather=session.driver.aside() if self._together else None,
        )

    def begin(self) -> None:
        """Start, after a restore: check that the run can be saved, and delete what a killed process left unfinished.

        Raises:
            StateError: The state of a callback cannot be saved; the message names the callback.
        """
        session = self.session
        snapshot.check_states(session)  # now, not when the first checkpoint is due
        self._fixed = snapshot.fixed_facts(session)
        if session.is_main:
            self.store.sweep()
        if any(kept.name for kept in self.retention.kept):
            names = [saved.name for saved in self.store.saved()] if session.is_main else None
            for warning in self.retention.forget_missing(session.driver.broadcast(names)):
                session.warn(warning)
        # A checkpoint of a suspended moment holds its beginning: the rest is to be saved, although no counter moves.
        self._saved_at = session.progress.now() if session.progress.step and session.sync.requests.suspended is None else None

    def save(self, reason: str) -> None:
        """Save the run, unless its newest checkpoint holds the present state.

        Raises:
            OSError: A write has failed, and `strict`.
        """
        session = self.session
        self.take_results()
        there = self._saved_at == session.progress.now() and session.cursor.at_boundary and not self.retention.pending
        if session.sync.together:  # only the main process knows whether a write has failed
            there = session.driver.broadcast(there)
        if there:
            return
        if self._together and session.driver.world_size > 1 and not session.sync.together:
            step, why = session.progress.step, "after an error a rank cannot count on the others' shards"
            session.decide("not saved", f"step {step}: {why}", data={"step": step, "error": None})
            return
        with session.hooks.timed("saving"):
            self._save(reason)
            self.take_results()

    def finish(self) -> None:
        """Return when nothing is being written; repeat a failed write for the last time.

        Raises:
            OSError: The write has failed, and `strict`.
        """
        with self.session.hooks.timed("saving"):
            self.attempts.stop()
            if not self._together or self.session.sync.together:
                self.attempts.finish()
            self.take_results()

    def report_best(self) -> None:
        """Record the best checkpoints as a decision, at the end of a run: their values, steps and paths."""
        root = self.session.directory
        folder = str(self.store.files)
        if root is not None and "://" not in folder and Path(folder).is_relative_to(root):
            folder = str(Path(folder).relative_to(root))  # equal runs in two directories record the same
        facts = [{**fact, "path": f"{folder}/{fact['checkpoint']}"} for fact in self.retention.facts]
        if facts and self.session.is_main:
            told = ", ".join(f"{one['monitor']} {best_text(one)} at step {one['step']} in {one['path']}" for one in facts)
            self.session.decide("best kept", told, who=self.who, data={"best": facts})

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
            if self.session.is_main:
                self._report(save, saved, pruned)

    def _save(self, reason: str) -> None:
        session = self.session
        if self.attempts.busy:
            session.decide("waited", "the last checkpoint is still being written", who=self.who)
        self.attempts.stop()  # the save that begins is newer
        self.take_results()
        before = self.retention.kept
        self._choose_best()
        taken = snapshot.take(session, reason, self._fixed)
        if session.is_main or self._together:
            self._saved_at = at = session.progress.now()
            content = taken.content(weights_only=self.weights_only, averaged=self.retention.averaged(at.step))
            content.facts["best"] = self.retention.facts  # so that a folder alone tells which of its checkpoints is the best
            self.attempts.start(Save(content, at, before, self.retention.kept, session.sync.requests.signalled_at))

    def _choose_best(self) -> None:
        """Make the checkpoint that is about to be written the best, if a value got better and the weights are finite."""
        session, pending = self.session, self.retention.pending
        if session.sync.together:
            pending = session.driver.broadcast(pending)
        if not pending:
            return
        finite = (session.is_main or self._together) and snapshot.is_finite(session)
        name = f"step-{session.progress.step:08d}"
        with suppress(Exception):  # if the folder cannot be read, the write reports the error
            name = self.store.next_name(session.progress.step).name
        self.retention.assign(name, usable=finite and session.is_main)

    def _prune(self, saved: Saved) -> list[str]:
        if not self.session.is_main:
            return []
        set_links(
            self.store, {LAST: saved.name, **self.retention.links}
        )  # first: a kill in between leaves links that lead somewhere
        return self.retention.prune(self.store, saved)

    def _report(self, save: Save, saved: Saved, pruned: list[str] | Exception) -> None:
        decide, reason = self.session.decide, save.content.facts["reason"]
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
        self.session.decide("not saved", f"step {step}: {error!r}", who=self.who, data={"step": step, "error": repr(error)})
        self.session.warn(f"the checkpoint of step {step} could not be written, and the training goes on: {error!r}{retry}")
        if self.strict:
            raise error
