"""`Checkpoint` without files: it decides which checkpoints a run would write and keep."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.checkpoint.keep_rules import Known
from cadenza.checkpoint.retention import NEWEST, Member, Retention
from cadenza.checkpoint.store import Saved
from cadenza.checkpoint.writer import CheckpointWriter
from cadenza.engine.session import Session, session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.run import Run
from cadenza.status.branches import Branch


class DryRetention(Retention):
    """Keep rules over checkpoints that are not there."""

    def kept_by_rules(self) -> dict[str, list[dict[str, str]]]:
        """Return the rules that keep each checkpoint, and that the newest one stays at which a run can continue."""
        kept, whole = self.kept(), [item for item in self.known if item.whole]
        if whole:
            kept.setdefault(max(whole, key=lambda saved: saved.rank).name, [{"callback": "", "rule": NEWEST}])
        return kept

    def apply(self, newest: Saved | None = None) -> list[str]:
        """Drop the checkpoints that no rule keeps; return their names."""
        self.known += [] if self.under_way is None else [self.under_way]
        self.under_way: Known | None = None
        kept = self.kept_by_rules()
        if newest is not None:
            kept.setdefault(newest.name, [])
        gone = [item.name for item in sorted(self.known, key=lambda saved: saved.rank) if item.name not in kept]
        self.known: list[Known] = [item for item in self.known if item.name in kept]
        return gone


class DryWriter(CheckpointWriter):
    """Notes what would be written."""

    def __init__(self, session: Session, folder: str, time_at: Callable[[int], float], *, weights_only: bool) -> None:
        branch = Branch("what if")
        store: Any = SimpleNamespace(files=folder, branch=branch)
        super().__init__(session, store, weights_only=weights_only)
        self.dry: DryRetention = DryRetention(store)
        self.retention: Retention = self.dry
        self._time_at = time_at
        self._written: dict[int, int] = {}  # how often each step was saved

    def begin(self) -> None:
        """Start."""
        if not self._begun:
            self._begun = True
            for member in self.retention.members.values():
                member.begin(self.session.progress, self.session.step.window.size)
            self.retention.began = self._time_at(0)

    @property
    def lost(self) -> str | None:
        """Nothing is lost."""
        return None

    def _save(self, reason: str, asking: Collection[str]) -> None:
        session, retention, at = self.session, self.retention, self.session.progress.now()
        for member in retention.members.values():
            member.pending = False
        self._postponed_at, self._saved_at = None, at
        again = self._written[at.step] = self._written.get(at.step, 0) + 1
        saved = Saved(at.step, again, f"step-{at.step:08d}" + (f"-{again}" if again > 1 else ""))
        facts = asdict(at) | retention.facts(at, asking, session.progress.batches_per_epoch)
        facts |= {"exact": True, "weights_only": self.weights_only, "time": self._time_at(at.step)}
        retention.write(saved, facts)
        self._newest = saved.name
        who = ", ".join(sorted(asking))
        session.decide("saved", f"{saved.name}: {reason}", who=who, data={"checkpoint": saved.name, "step": saved.step})
        if gone := retention.apply(saved):
            session.decide("pruned", ", ".join(gone), who=who, data={"checkpoints": gone})


class DryCheckpoint(Checkpoint):
    """A `Checkpoint` that writes nothing."""

    def __init__(self, given: Checkpoint, time_at: Callable[[int], float]) -> None:
        self.__dict__.update(copy(given).__dict__)
        self.name: str | None = given.name or type(given).__name__
        self._time_at, self._lacks = time_at, ""

    def on_setup(self, run: Run) -> None:
        session, folder = session_of(run), self.own_folder or "checkpoints"
        for monitor in self.monitors:
            monitor.reset()
        writers = [saver for saver in session.savers if isinstance(saver, DryWriter)]
        same = [writer for writer in writers if (str(writer.store.files), writer.weights_only) == (folder, self.weights_only)]
        writer = same[0] if same else DryWriter(session, folder, self._time_at, weights_only=self.weights_only)
        if not same:
            session.savers.append(writer)
        self.writer: CheckpointWriter = writer
        self.member: Member = Member(hooks_of(run).name_of(self), self.keep, self.monitors, saves_errors=self.watch_errors)
        self.writer.join(self.member, background=False, strict=False, grace_s=None)

    def on_fit_start(self, run: Run) -> None:
        for monitor in self.monitors:
            monitor.check(run)
        self.writer.begin()
