"""Save a run: copy it to the host, hand the copy to a thread that writes it, and report the result at a step boundary."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from weakref import proxy

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.retention import Member, Retention
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.content import DeviceBuffers, HostBuffers, JoinedFiles, NoBuffers
from cadenza.checkpoint.store.files import BEST, LAST
from cadenza.checkpoint.store.manifest import best_brief, best_text
from cadenza.checkpoint.weights import LEFT_OUT
from cadenza.drivers.consensus import ALONE, Meeting
from cadenza.engine.session import Session
from cadenza.hooks.moments import Callback
from cadenza.status.encoding import host_copy
from cadenza.status.progress import Counters


class CheckpointWriter:
    """Writes the checkpoints of all callbacks that save the same content to one folder in one run. Every rank makes one.

    Callbacks that ask for a save at the same step boundary share one write. Results of writes come from another thread.
    `take_results` applies them: at the next step boundary, or before the next save.

    Args:
        session: The run to save.
        store: The store to write to.
        weights_only: Write the model alone.
    """

    def __init__(self, session: Session, store: Store, *, weights_only: bool = False) -> None:
        self.session: Session = proxy(session)  # which holds this
        self.store: Store = store
        self.weights_only: bool = weights_only
        self.retention: Retention = Retention(store)
        buffers = DeviceBuffers() if session.driver.device.type == "cuda" else HostBuffers()
        self.attempts: Attempts = Attempts(store, self._sync, self._prune, self._notify, buffers=buffers)
        """The thread that writes."""
        self._begun = False
        self._together = session.driver.shards or (session.driver.world_size > 1 and not weights_only)
        """Whether all ranks write: shards, or the state that only a rank has. Otherwise the main process does."""
        self._saved_at: Counters | None = None
        """The counters of the newest checkpoint, written or being written; None if its write has failed."""
        self._newest: str | None = None
        """The name of this checkpoint, once it is written."""
        self._asked: dict[str, str] = {}
        """Why callbacks ask for a save at the step boundary."""
        self._late: set[str] = set()
        """Callbacks that ask for the checkpoint that is being written."""
        self._postponed_at: int | None = None
        self._told_best = False
        self._fixed: dict[str, Any] = {}
        self._half_changed = False

    @property
    def names(self) -> list[str]:
        """The names of the callbacks."""
        return [*self.retention.members]

    def join(self, member: Member, *, background: bool, strict: bool, grace_s: float | None) -> None:
        """Add a callback, before the run begins. What one of them asks for counts for all."""
        self.retention.members[member.name] = member
        if not background:
            self.stay_in_foreground()
        self.attempts.repeats &= not strict
        self.attempts.grace_s = min(self.attempts.grace_s, math.inf if grace_s is None else grace_s)

    def stay_in_foreground(self) -> None:
        """Write each checkpoint before the training continues."""
        self.attempts.background, self.attempts.buffers = False, NoBuffers()

    def begin(self) -> None:
        """Start, after a restore: check that the run can be saved, and complete what a killed process left unfinished.

        Raises:
            StateError: The state of a callback cannot be saved; the message names the callback.
        """
        if self._begun:  # another callback has started it
            return
        self._begun, session = True, self.session
        if self._together:
            self.attempts.meeting = session.driver.aside()
        for member in self.retention.members.values():
            member.begin(session.progress, session.step.window.size)
        snapshot.check_states(session)  # now, not when the first checkpoint is due
        self._fixed = snapshot.fixed_parts(session)
        if session.driver.is_main:
            self.store.sweep()
            self._take_up()
        # A checkpoint with evaluations still due holds no results of them: these are to be saved, although no counter moves.
        resumed = session.progress.step and session.due.state is None
        self._saved_at, self._newest = (session.progress.now(), self.store.branch.at) if resumed else (None, None)

    def ask(self, name: str, reason: str) -> None:
        """Ask for a save at the step boundary, for a callback. Every rank must call this."""
        if not self._asked:
            self.session.acts.after_step(self._save_asked)
        reasons = dict.fromkeys([*self._asked.get(name, reason).split("; "), reason])
        self._asked[name] = "; ".join(reasons)

    def request(self, reason: str) -> None:
        """Save the run, at a step boundary, for all callbacks. Every rank must call this."""
        self._asked = {**dict.fromkeys(self.names, reason), **self._asked}
        self._save_asked()

    def save(self, reason: str, names: Collection[str] = (), *, last: bool = False) -> None:
        """Save the run now, unless its newest checkpoint holds the present state. Every rank must call this.

        Args:
            reason: The reason.
            names: The callbacks that ask for it; none: all.
            last: Whether the run is at its end: the save cannot wait for the end of a block.

        Raises:
            OSError: A write has failed, and `strict`.
        """
        session = self.session
        if not self._begun or self._half_changed or session.sync.requests.is_broken:
            return
        self.take_results()
        asking = {*(names or self.names), *self._asked}
        self._asked = {}
        there = self._saved_at == session.progress.now() and session.cursor.at_boundary and not self.retention.pending
        blocked = bool(session.blocks.open)
        if session.sync.together:  # only the main process knows whether a write has failed
            there, blocked = session.driver.broadcast(there), session.driver.any_rank(blocked)
        if there:
            self._join(asking)
            return
        if session.restored.pending:  # an error or a stop in the start of a resume: its checkpoint is the newest state
            return
        if blocked:
            self._wait(asking, reason, last=last)
            return
        if session.driver.shards and session.driver.world_size > 1 and not session.sync.together:
            self._decide_not_saved("after an error a rank cannot count on the others' shards")
            return
        with session.progress.aside(), session.hooks.timed("saving"):
            try:
                self._save(reason, asking)
            except BaseException:
                self.attempts.meeting.leave()  # other ranks may wait for the part of this rank in the save
                raise
            self.take_results()

    def save_error(self, error: BaseException) -> None:
        """Save the run after an error, for the callbacks that do so. If it left a block, nothing is saved any more."""
        if (block := self.session.blocks.left_by(error)) and not self._half_changed:
            self._half_changed = True
            self._report_no_save(f"the error {error!r} left the block of {block}")
        savers = [member.name for member in self.retention.members.values() if member.saves_errors]
        if savers and self.session.progress.step:
            self.save(f"an error: {error!r}", savers, last=True)

    def finish(self) -> None:
        """Return when nothing is being written; repeat a failed write for the last time.

        Raises:
            OSError: The write has failed, and `strict`.
        """
        if not self._begun:
            return
        with self.session.progress.aside(), self.session.hooks.timed("saving"):
            self.attempts.stop()
            if self._together and self.session.sync.broken:
                self.attempts.meeting.leave()  # others may wait for the part of this rank in a save that it did not begin
            if self.attempts.failed is not None and (self.session.sync.together or not self.attempts.failed.together):
                self.attempts.finish()
            self.take_results()
            self.attempts.buffers.take_back(())

    def report_best(self) -> None:
        """Record the best checkpoints as a decision, at the end of a run: their values, steps and paths."""
        root = self.session.directory
        folder = str(self.store.files)
        if root is not None and "://" not in folder and Path(folder).is_relative_to(root):
            folder = str(Path(folder).relative_to(root))  # equal runs in two directories record the same
        facts = [{**fact, "path": f"{folder}/{fact['checkpoint']}"} for fact in self.retention.bests()]
        if facts and self.session.driver.is_main and not self._told_best:  # once, for all callbacks
            self._told_best = True
            told = ", ".join(f"{fact['monitor']} {best_text(fact)} at step {fact['step']} in {fact['path']}" for fact in facts)
            self.session.decide("best kept", told, who=", ".join(self.names), data={"best": facts})

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
        """Apply the results of writes: decisions, warnings, callbacks that joined in the meantime.

        Raises:
            OSError: A write has failed, and `strict`.
        """
        while self.attempts.results:
            self._take(*self.attempts.results.popleft())

    def _take(self, save: Save, saved: Saved | Exception, pruned: list[str] | Exception) -> None:
        if isinstance(saved, Exception):
            self._saved_at = self.retention.under_way = None
            self._report_failure(save, saved)
            return
        self._newest = saved.name
        if save.error is not None:  # a later attempt was successful
            self._saved_at = save.at
        if self.session.driver.is_main:
            self._report(save, saved, pruned)
        late, self._late = self._late, set()
        self._join(late)

    def _sync(self) -> None:
        """Have sinks and files hold the records before the checkpoint: a run that continues writes none of them again.

        A save for a signal does not wait for sinks: the time may be short, and the end of the run waits for them.
        """
        if self.session.sync.requests.signalled_at is None:
            self.session.metrics.writer.flush()
        if self.session.files is not None:
            self.session.files.sync()

    def _save_asked(self) -> None:
        if not self._asked:
            return
        if self._waits_for_epoch_end():
            self.session.acts.after_next_step(self._save_asked)
            return
        asked, self._asked = self._asked, {}
        self.save("; ".join(dict.fromkeys(asked.values())), asked)

    def _wait(self, asking: Collection[str], reason: str, *, last: bool) -> None:
        """Save at a later step boundary, or not at all if the run is at its end. Some rank blocks saves."""
        session, who, step = self.session, ", ".join(sorted(asking)), self.session.progress.step
        blocks = [str(block) for block in session.blocks.open]
        if session.sync.together:
            blocks = [f"{block} on rank {rank}" for rank, some in enumerate(session.driver.gather(blocks)) for block in some]
        by = ", ".join(blocks)
        if last:
            self._report_no_save(f"saves are blocked by {by}")
            return
        if self._postponed_at is None:
            data = {"step": step, "blocked_by": blocks}
            session.decide("save postponed", f"{reason}: saves are blocked by {by}", who=who, data=data)
            self._postponed_at = step
        self._asked = {**dict.fromkeys(asking, reason), **self._asked}
        session.acts.after_next_step(self._save_asked)

    def _report_no_save(self, why: str) -> None:
        """Record that the run ends without a checkpoint of its last state."""
        step = self._decide_not_saved(why, who=", ".join(self.names))
        self.session.warn(f"the state after step {step} is not saved: {why}. The run continues at the checkpoint before")

    def _decide_not_saved(self, why: str, *, who: str | None = None) -> int:
        """Record that the present state is not saved; return its step."""
        step = self.session.progress.step
        self.session.decide("not saved", f"step {step}: {why}", who=who, data={"step": step, "error": None})
        return step

    def _waits_for_epoch_end(self) -> bool:
        """Return whether the epoch ends with this step and nothing but saves happens then, so that one checkpoint is enough.

        If a hook evaluates at the end of the epoch, the steps before it are saved first.
        """
        session = self.session
        progress, hooks = session.progress, session.hooks
        waits = False
        if session.cursor.in_epoch and progress.batch_in_epoch == progress.batches_per_epoch:
            savers = {name for saver in session.savers if isinstance(saver, CheckpointWriter) for name in saver.names}
            others = [hook for hook in hooks.by_moment.get(Callback.on_epoch_end, ()) if hook.owner not in savers]
            waits = all(other.silent for other in others)
        return bool(session.driver.broadcast(waits)) if session.sync.together else waits

    def _save(self, reason: str, asking: Collection[str]) -> None:
        session, retention = self.session, self.retention
        self._postponed_at = None
        if self.attempts.busy:
            session.decide("waited", "the last checkpoint is still being written", who=", ".join(sorted(asking)))
        self.attempts.stop()  # the save that begins is newer
        self.take_results()
        if session.sync.together:  # all ranks compare, also if the rest of the save fails on one
            session.acts.after_next_step(snapshot.Digest(session).compare)
        taken = snapshot.take(session, reason, self._fixed)
        for member in retention.members.values():
            member.pending = False
        together = self._together and (session.sync.together or session.driver.world_size == 1)
        if session.driver.is_main or together:
            at = self._saved_at = session.progress.now()
            self._newest, self._late = None, set()
            copy, averaged = self.attempts.buffers.copy, retention.averaged(at.step)
            content = taken.content(weights_only=self.weights_only, averaged=averaged, copy=copy)
            self.attempts.buffers.copied()
            content.facts |= {**retention.facts(at, asking, session.progress.batches_per_epoch), "best": []}
            if retention.watching:
                self._add_bests(content, at.step)
            self.attempts.start(Save(content, at, together, session.sync.requests.signalled_at))

    def _add_bests(self, content: Content, step: int) -> None:
        """Add to the facts which checkpoints are the best, with the one that is about to be written."""
        retention = self.retention
        if retention.judges(step):  # else the thread that writes looks
            content.facts["finite"] = content.is_finite()
        if self.session.driver.is_main:
            saved = Saved(step, 1, f"step-{step:08d}")
            with suppress(Exception):  # if the folder cannot be read, the write reports the error
                saved = self.store.next_name(step)
            retention.write(saved, content.facts)
            content.facts["best"] = retention.bests()

    def _join(self, asking: Collection[str]) -> None:
        """Let callbacks have the newest checkpoint as well."""
        if not self.session.driver.is_main or not asking:
            return
        if self._newest is None:
            self._late.update(asking)
        elif self.retention.join(self._newest, asking):
            gone = self.retention.apply()
            if gone:
                self.session.decide("pruned", ", ".join(gone), who=", ".join(self.names), data={"checkpoints": gone})

    def _prune(self, saved: Saved) -> list[str]:
        return self.retention.apply(saved) if self.session.driver.is_main else []

    def _notify(self) -> None:
        self.session.acts.after_step(self.take_results)

    def _take_up(self) -> None:
        """Report changes of the rules, set the links, and delete what a killed process was about to delete."""
        session, retention = self.session, self.retention
        savers = [saver for saver in session.savers if isinstance(saver, CheckpointWriter)]
        beside = [saver for saver in savers if str(saver.store.files) == str(self.store.files)]
        whole = [writer for writer in beside if not writer.weights_only]
        bests = [writer for writer in beside if any(member.keep.best for member in writer.retention.members.values())]
        retention.sets = frozenset(
            link for link, first in ((LAST, [*whole, *beside][0]), (BEST, bests[0] if bests else None)) if first is self
        )
        changes, missing = retention.begin([name for writer in beside for name in writer.names])
        for sentence in changes:
            session.decide("rules changed", sentence, who=", ".join(self.names))
        for sentence in (*changes, *missing):
            session.warn(sentence)

    def _report(self, save: Save, saved: Saved, pruned: list[str] | Exception) -> None:
        decide, facts, reason = self.session.decide, save.content.facts, save.content.facts["reason"]
        again = f", at attempt {save.attempts}" if save.attempts > 1 else ""
        who = ", ".join(facts["asked_by"])
        best = [best_brief(best) for best in self.retention.bests() if best["checkpoint"] == saved.name]
        data = {"checkpoint": saved.name, "step": saved.step, "attempts": save.attempts, "reason": reason, "best": best}
        decide("saved", f"{saved.name}: {reason}{again}", who=who, data=data)
        if isinstance(pruned, Exception):
            decide("not pruned", repr(pruned), who=who, data={"error": repr(pruned)})
        elif pruned:
            decide("pruned", ", ".join(pruned), who=who, data={"checkpoints": pruned})

    def _report_failure(self, save: Save, error: Exception) -> None:
        step, who = save.at.step, ", ".join(save.content.facts["asked_by"])
        self.session.decide("not saved", f"step {step}: {error!r}", who=who, data={"step": step, "error": repr(error)})
        strict = not self.attempts.repeats
        told = f"the checkpoint of step {step} could not be written, and the training"
        ends = f"ends: {error!r}" if strict else f"goes on: {error!r}. It is tried again until the next save"
        self.session.warn(f"{told} {ends}")
        if strict:
            self._asked = {}  # or the end of the run would carry out a save that was due at the same step boundary
            raise error


def writer_for(session: Session, store: Store, *, weights_only: bool) -> CheckpointWriter:
    """Return the writer of this run for a folder and a content: one for all callbacks that save there."""
    here = str(store.files)
    for saver in session.savers:
        if isinstance(saver, CheckpointWriter) and (str(saver.store.files), saver.weights_only) == (here, weights_only):
            return saver
    session.savers.append(writer := CheckpointWriter(session, store, weights_only=weights_only))
    return writer


# -- one checkpoint, written and tried again -------------------------------------------------------


PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts during the training. The last one repeats."""
LAST_PAUSES_S: tuple[float, ...] = (0.1, 0.4, 1.0)
"""Pauses between attempts at the end of a run."""
_SLICE_S = 0.25
_BYTES_PER_S = 50e6  # the assumed rate before the first write


@dataclass(slots=True)
class Save:
    """A checkpoint to write."""

    content: Content
    at: Counters
    together: bool = False
    """Whether all ranks write."""
    signalled_at: float | None = None
    """The time by `time.monotonic` of the signal that ends the process; None without a signal."""
    attempts: int = 0
    error: Exception | None = None
    """The error of the last failed attempt; None if none has failed."""


class Result(NamedTuple):
    """A checkpoint that is written, or the error of the first attempt."""

    save: Save
    saved: Saved | Exception
    pruned: list[str] | Exception
    """The names of the deleted checkpoints, or the error of the deletion."""


@dataclass(slots=True, eq=False)
class Attempts:
    """Writes one checkpoint at a time, until it is written."""

    store: Store
    sync: Callable[[], object]
    """Called before each attempt, to flush the files that the checkpoint refers to. An OSError is ignored: lost rows are
    written again from the history when the run continues."""
    prune: Callable[[Saved], list[str]]
    """Called after a write, to delete the checkpoints that are no longer kept; returns their names."""
    notify: Callable[[], object]
    """Called after each addition to `results`, on the thread that writes."""
    background: bool = True
    """Whether the first attempt is made in a thread. Further attempts are always made in a thread."""
    repeats: bool = True
    """Whether further attempts are made, with growing pauses, until `stop`. Else the first error is raised."""
    grace_s: float = math.inf
    """The seconds between a signal and the end of the process. If the time may be too short for the whole checkpoint, its
    weights are written first."""
    meeting: Meeting = ALONE
    """The ranks that write a `Save` together. Each rank must start and stop, and all make the same number of attempts."""
    buffers: HostBuffers = field(default_factory=HostBuffers)
    """Brings the content to the host, and takes its memory back when it is written."""
    results: deque[Result] = field(default_factory=deque, init=False)
    _unsaved: Save | None = field(default=None, init=False)  # the newest checkpoint while it is not written
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _bytes_per_s: float = field(default_factory=lambda: _BYTES_PER_S, init=False)

    @property
    def busy(self) -> bool:
        """Whether a first attempt is in progress."""
        return self._unsaved is not None and self._unsaved.error is None

    @property
    def failed(self) -> Save | None:
        """The newest checkpoint if its write has failed, and no later attempt was successful."""
        return self._unsaved if self._unsaved is not None and self._unsaved.error is not None else None

    def start(self, save: Save) -> None:
        """Make the first attempt. Call `stop` before."""
        self._stopped.clear()
        self._unsaved = save
        if not self.background:
            if self._attempt(save):
                return
            if self.repeats:
                save.content = save.content.mapped(host_copy)  # the training goes on and changes the tensors
        first = [0.0] if self.background else []
        pauses_s = chain(first, PAUSES_S, repeat(PAUSES_S[-1])) if self.repeats else first
        # No daemon: the process must not end while a checkpoint is half written.
        self._thread = threading.Thread(target=self._repeat, args=(save, pauses_s), name="cadenza-checkpoint", daemon=False)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the first attempt, or for a later one that has begun; make no further attempt."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Make the last attempts, in the calling thread. Call `stop` before."""
        if self.failed is not None and self.repeats:
            self._stopped.clear()
            self._repeat(self.failed, LAST_PAUSES_S)

    def _repeat(self, save: Save, pauses_s: Iterable[float]) -> None:
        for pause_s in pauses_s:
            if (pause_s and self._stopped_within(pause_s, together=save.together)) or self._attempt(save):
                return

    def _attempt(self, save: Save) -> bool:
        """Write a checkpoint, then prune; return whether it is written."""
        save.attempts += 1
        with suppress(OSError):
            self.sync()
        try:
            save.content = content = self.buffers.fetched(save.content)
            if save.signalled_at is not None:
                self._write_weights_first(content, self.grace_s - (time.monotonic() - save.signalled_at))
            began = time.monotonic()
            saved = self.store.write_together(content, self.meeting) if save.together else self.store.write(content)
            self._bytes_per_s = content.nbytes / max(time.monotonic() - began, 1e-6)
        except Exception as error:
            save.error = error
            if save.attempts == 1:
                self.results.append(Result(save, error, []))
                self.notify()
            return False
        self.buffers.take_back(content.emptied())
        try:
            pruned: list[str] | Exception = self.prune(saved)
        except Exception as error:  # the checkpoint is written, and that counts
            pruned = error
        self._unsaved = None
        self.results.append(Result(save, saved, pruned))
        self.notify()
        return True

    def _write_weights_first(self, content: Content, left_s: float) -> None:
        """Write the weights alone if the time may be too short for the whole checkpoint. Shards are not written alone."""
        if (
            self.meeting.rank
            or content.is_sharded
            or content.facts.get("weights_only")
            or content.nbytes / self._bytes_per_s <= left_s
        ):
            return
        facts = {**content.facts, "weights_only": True, "reason": f"{content.facts['reason']}, weights first"}
        left_out = {LEFT_OUT: content.plain[LEFT_OUT]} if LEFT_OUT in content.plain else {}
        self.store.write(replace(content, plain=left_out, tensors={}, facts=facts, files=JoinedFiles()))

    def _stopped_within(self, pause_s: float, *, together: bool) -> bool:
        """Wait; return whether this rank or another one was stopped in the meantime."""
        if not together:
            return self._stopped.wait(pause_s)
        deadline = time.monotonic() + pause_s
        while True:
            stopped = self._stopped.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            try:
                everyone = self.meeting.gather_on_main((stopped, time.monotonic() >= deadline))
                stops = any(stopped for stopped, _ in everyone)
                stops, over = self.meeting.broadcast((stops, all(over for _, over in everyone)))
            except RuntimeError:  # another rank is gone, and nothing can be written together
                return True
            if stops or over:
                return bool(stops)
