"""Continue a run, start it again, or find that it is over; before this, choose its checkpoint and its branch."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard
from weakref import proxy

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.catalogue import Catalogue, Reader, checkpoint_at, entry_at, find, first_usable, is_name, on_all_ranks
from cadenza.checkpoint.parts import Written, load_callbacks, placed
from cadenza.checkpoint.snapshot import check_whole
from cadenza.checkpoint.store import Branch, Entry, Loaded, Store
from cadenza.checkpoint.store.checkpoints import not_exact
from cadenza.checkpoint.store.files import LAST, absolute_path
from cadenza.drivers import Driver
from cadenza.engine import boundary
from cadenza.engine.dry_run import Beginning
from cadenza.engine.plan import argument_changes, plan_changes
from cadenza.engine.session import Session
from cadenza.engine.start_checks import main_only, tell
from cadenza.errors import CheckpointError
from cadenza.files.new_directory import meant_instead
from cadenza.files.paths import is_local, local_text
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import ReplacesWeights
from cadenza.loading import resumable
from cadenza.loading.shards import Shard
from cadenza.optim.settings import limits_of
from cadenza.records import branch_files
from cadenza.records.directory import OVER, RecordedRun, RunDirectory
from cadenza.records.history import History, write_again
from cadenza.records.reading import read_records
from cadenza.status.decisions import RESUMABLE, GoBack, Outcome
from cadenza.status.formats import clock, counted, printable
from cadenza.status.progress import Counters, Progress

logger: logging.Logger = logging.getLogger("cadenza")


def is_over(directory: RecordedRun | None, limits: Progress, start: Start) -> bool:
    """Return whether the run has ended, and neither a larger limit nor a named checkpoint continues it.

    A run that rolls back is not over.

    Raises:
        CheckpointError: The run ended and is to continue, but it has no checkpoint to continue at.
    """
    if directory is None or start.ended is None or start.left is not None:
        return False
    now = _reached(directory, start.loaded)
    limits.begin(now, limits.batches_per_epoch)
    if limits.finished or (start.ended == "stopped" and not start.named and not _is_longer(limits, start.loaded)):
        return True
    if not _is_whole(start.loaded):
        raise CheckpointError(none_to_continue(directory, start, f"{start.ended} at {now}, and this start asks for more"))
    return False


def _is_longer(limits: Progress, loaded: Loaded | None) -> bool:
    """Return whether a limit is larger than the one with which the checkpoint was written."""
    before = {} if loaded is None else loaded.state.get("given", {}).get("limits", {})
    longer = (before[name] is not None and (now is None or now > before[name]) for name, now in limits_of(limits).items())
    return bool(before) and any(longer)


def as_it_ended(session: Session, directory: RunDirectory | None, start: Start) -> Session:
    """Restore the final state of a run that is over, as far as it was saved. Every rank must call this."""
    loaded = start.loaded
    ended = session.driver.broadcast(None if directory is None else _ended(directory, loaded, session.metrics.history.limit))
    session.metrics.history, reached, outcome = ended
    if loaded is not None:
        snapshot.load_model(session, loaded)
        session.extra_parameters.begin(session.run)
        session.extra_parameters.load_state_dict(loaded.state.get("outside", {}))
        session.run.state.update(placed(session, loaded.state.get("state", {})))
        own = loaded.by_rank[min(session.driver.rank, len(loaded.by_rank) - 1)]
        load_callbacks(session, loaded.name, own.get("callbacks of the rank", {}))
        states = placed(session, loaded.state.get("callbacks", {}))
        for name, callback in session.hooks.callbacks.items():
            if name in states and isinstance(callback, ReplacesWeights):
                callback.put_in_place_again(session.run, states[name])
    session.progress.begin(reached, session.progress.batches_per_epoch)
    session.end(outcome)
    if session.driver.is_main:
        text = "nothing to do: the run in %s is over (%s: %s)%s"
        more = _how_to_continue(session.progress) if _is_whole(loaded) else ""
        before = {} if directory is None else (directory.previous or {}).get("arguments", {})
        if changes := argument_changes(before, session.arguments):
            more += f". This start has other arguments, which changed nothing: {'; '.join(changes)}. To train with them, give"
            more += " another directory="
        logger.warning(text, session.directory, printable(outcome.kind), printable(outcome.reason), more)
        if loaded is None:
            logger.warning("no checkpoint of the run in %s is there, so the model does not have its weights", session.directory)
        elif not _is_whole(loaded):
            logger.warning("the model has the weights of %s, which holds weights only", loaded.name)
    return session


def _how_to_continue(progress: Progress) -> str:
    done = {"max_epochs": progress.epoch, "max_steps": progress.step, "max_tokens": progress.tokens}
    reached = [
        f"{name}={most}" + (f" to more than {done[name]}" if done[name] > most else "")
        for name, most in limits_of(progress).items()
        if most is not None and done[name] >= most
    ]
    return (
        f". To continue, increase {' and '.join(reached)}" if reached else f'. fit(resume="{LAST}") continues where it stopped'
    )


def tell_how_to_go_on(session: Session, resume: object) -> None:
    """Tell, after a run that a signal ended, where it is saved and how it goes on."""
    saved = next((decision.data for decision in reversed(session.run.decisions) if decision.what == "saved"), None)
    if saved is None:
        tell(session, "nothing of this run is saved. Add Checkpoint(...) to callbacks, and give directory=.")
        return
    lost = session.progress.step - saved["step"]
    more = f", without the last {counted(lost, 'step')}" if lost else ""
    how = "the same command again goes on" if resume == "auto" else 'fit(resume="auto") goes on'
    tell(session, f"the run is saved as {saved['checkpoint']}{more}: {how} there")


def begin(session: Session, directory: RunDirectory | None, start: Start, facts: Mapping[str, Any]) -> None:
    """Write ``run.json``. If the run starts again, copy the rows of its first attempt and warn."""
    kept = []
    if directory is not None:
        if start.is_anew and start.left is not None:
            kept = branch_files.keep(directory.path, start.left)
            branch_files.drop_old(directory.path)  # no checkpoint needs them, else there is no new start
        # A rollback is written only after the checkpoint has been restored.
        previous = {name: fact for name in ("branch", "parent") if (fact := (directory.previous or {}).get(name)) is not None}
        known = {"data": data} if not start.is_anew and (data := (directory.previous or {}).get("data")) else {}
        directory.when_gone = partial(boundary.recreate_directory, proxy(session))
        directory.begin({**facts, **known, **start.facts(), **(previous if start.rolls_back else {})})
        if start.is_anew:
            directory.cut({}, step=-1)
    if start.is_anew:
        why = "; ".join(start.lost) or "no checkpoint was written"
        session.decide("started anew", why, who="the trainer", data={"lost": list(start.lost)})
        rows = f" The rows written so far are in {', '.join(kept)}." if kept else ""
        session.warn(f"the run in {session.directory} starts anew, as no checkpoint can be continued: {why}.{rows}")


def restored(session: Session, directory: RunDirectory | None, start: Start, *, strict: bool) -> None:
    """Restore the state of the checkpoint, and the rows of that time. Every rank must call this."""
    loaded = start.loaded
    assert loaded is not None, "only a run that continues is restored"
    snapshot.restore(session, loaded, strict=strict)
    kept = main_only(session.driver, lambda: [] if directory is None else _take_rows(directory, start, loaded))
    session.decide("resumed", f"at {loaded.name}", who="the trainer", data={"checkpoint": loaded.name})
    if session.advises:
        now, ago = session.progress.now(), clock(max(0.0, time.time() - loaded.manifest.get("time", 0)))
        epoch = f", epoch {now.epoch + 1}" if session.progress.has_epochs else ""
        tell(session, f"resumed at {loaded.name}: step {now.step}{epoch}; it was written {ago} ago")
    _tell_plan_changes(session, directory)
    own = loaded.branch.run == start.branch.run
    if directory is not None and own and (lost := write_again(directory.path / "metrics.jsonl", session.metrics.history)):
        _tell_lost_records(session, lost, loaded.name)
    if start.rolls_back:
        _tell_rollback(session, start.left, loaded.name, kept)


def _tell_rollback(session: Session, left: int | None, checkpoint: str, kept: Sequence[str] | None) -> None:
    rows = f"; its rows are in {', '.join(kept)}" if kept else ""
    why = f"branch {left} is abandoned after {checkpoint}{rows}"
    session.decide("rolled back", why, who="the trainer", data={"branch": left, "checkpoint": checkpoint})


def _tell_lost_records(session: Session, lost: int, checkpoint: str) -> None:
    told = (
        f"{counted(lost, 'record')} of metrics.jsonl were lost, for example by a power cut, and are written again from "
        f"{checkpoint}"
    )
    session.decide("records restored", told, who="the trainer", data={"records": lost, "checkpoint": checkpoint})
    session.warn(f"{told}{', as far as its thinned history has them' if session.metrics.history.thinned else ''}")


def _tell_plan_changes(session: Session, directory: RunDirectory | None) -> None:
    """Record how the plan differs from the plan of the run so far. Every rank must call this."""
    plans = None if directory is None else directory.plans
    changes: list[str] = plan_changes(*plans) if plans else []
    before, now = ((directory and directory.previous) or {}).get("arguments"), session.arguments.get("compute_loss")
    if isinstance(before, Mapping) and (loss := before.get("compute_loss", now)) != now:
        changes += [f"- compute_loss: {loss}", f"+ compute_loss: {now}"]
    changes = session.driver.broadcast(changes)
    if changes:
        told = f"since the run so far: {'; '.join(changes)}"
        session.decide("plan changed", told, who="the trainer", data={"changes": changes})
        if any(not line[2:].startswith("fit: ") for line in changes):
            session.warn(f"the plan has changed {told}")


def _take_rows(directory: RunDirectory, start: Start, loaded: Loaded) -> list[str]:
    """Restore the rows and media of the checkpoint. Write a rollback to ``run.json`` before the new branch writes anything.

    A continued run writes dropped rows and media again. Those of an abandoned branch are not written again, so they are copied.
    """
    own = loaded.branch.run == start.branch.run
    offsets = loaded.state["offsets"] if own else {}  # the offsets of another session belong to its own files
    step = loaded.manifest["step"] if own else -1
    kept = []
    directory.goes_on()
    if start.rolls_back and start.left is not None:
        kept = branch_files.keep(directory.path, start.left)
        directory.note(start.facts())
    if own and loaded.branch.number != start.branch.number:
        branch_files.take_back(directory.path, loaded.branch.number, offsets, step)
    else:
        directory.cut(offsets, step)
    return kept


def _ended(directory: RunDirectory, loaded: Loaded | None, limit: int) -> tuple[History, Counters, Outcome]:
    previous = directory.previous or {}
    history = History(limit)
    for record in read_records(directory.path / "metrics.jsonl"):  # a checkpoint lacks the records after it
        history.add(record)
    if not history.names and _is_whole(loaded):
        history = History.from_state(loaded.state["history"], limit)
    return history, _reached(directory, loaded), Outcome(previous["outcome"]["kind"], previous["outcome"]["reason"])


def _reached(directory: RecordedRun, loaded: Loaded | None) -> Counters:
    """Return the last counters of a run: from its last checkpoint, else from ``run.json``, else from the last record."""
    return Counters(**loaded.state["progress"]) if _is_whole(loaded) else _last_noted(directory)


def _last_noted(directory: RecordedRun) -> Counters:
    told = (directory.previous or {}).get("progress")
    if told is not None:
        return Counters(**told)
    return max(
        (record.at for record in read_records(directory.path / "metrics.jsonl")), key=attrgetter("batch"), default=Counters()
    )


def _is_whole(loaded: Loaded | None) -> TypeGuard[Loaded]:
    """Return whether a checkpoint holds the whole state. Else it holds weights only."""
    return loaded is not None and "config" in loaded.state


# -- without a run ---------------------------------------------------------------------------------


def beginning(
    resume: bool | str | PathLike[str],
    directory: Path | None,
    elsewhere: Sequence[str | PathLike[str]],
    hooks: Hooks,
    progress: Progress,
    loader: Iterable[object],
    shard: Shard,
) -> Beginning:
    """Move `hooks` and `progress` to the point at which ``fit(resume=...)`` continues, and return where that is.

    Args:
        resume: As for ``fit``.
        directory: The run directory, if there is one.
        elsewhere: Further folders and URLs that the run saves to.
        hooks: The callbacks of a run that does not begin: the timers of their schedules are moved.
        progress: The limits of the run.
        loader: The training loader.
        shard: The shard that this rank reads.

    Raises:
        CheckpointError: No checkpoint can be used; or the loader has another number of batches.
        DataError: This number of ranks cannot continue inside the epoch.
    """
    recorded = None if directory is None else RecordedRun(directory)
    start = chosen(resume, RunSoFar(recorded, elsewhere))
    if is_over(recorded, progress, start):
        return Beginning(stops=True)
    if start.loaded is None:
        return Beginning()
    check_whole(start.loaded)
    state, written = start.loaded.state, Written.read(start.loaded.name, start.loaded.state)
    reads = resumable(loader, 0, shard=shard).shard
    written.check_length(loader, reads, progress.batches_said)
    written.check_position(reads)
    past = written.restore_counters(progress, loader, shard)
    hooks.restore_schedules(state.get("schedules", {}), progress)
    interrupted = start.loaded.by_rank[0].get("evaluations due") or {}
    requests = state["requests"]
    ends = "end_epoch" in requests or state["exhausted"] or (written.over and shard.world_size != written.ranks)
    return Beginning(
        in_epoch=state["in_epoch"],
        leaves=ends or "stop" in requests,
        counts=ends,
        stops="stop" in requests,
        sized=not past and progress.corrected is None,
        due=interrupted.get("names", ()),
    )


# -- the start of a run: its checkpoint and its branch ---------------------------------------------


@dataclass(slots=True)
class Start:
    """The start of a run."""

    branch: Branch
    """The branch that the run continues or begins."""
    loaded: Loaded | None = None
    """The checkpoint at which the run continues; None for a new start."""
    path: str | None = None
    """The path of the checkpoint at which the branch began; None if it began without one."""
    left: int | None = None
    """The number of the branch that this start abandons; None if it abandons none."""
    recovery: Mapping[str, Any] | None = None
    """The data of the rollback with which the branch begins or began; None if the user chose its beginning."""
    lost: tuple[str, ...] = ()
    """The reasons why existing checkpoints are not used."""
    ended: str | None = None
    """The outcome that ends a run, ``"finished"`` or ``"stopped"``; None if the run has not ended."""
    named: bool = False
    """Whether the user named the checkpoint: a run continues there after any stop."""

    @property
    def rolls_back(self) -> bool:
        """Whether a new branch begins at a checkpoint."""
        return self.left is not None and self.loaded is not None

    @property
    def is_anew(self) -> bool:
        """Whether the run starts again without a checkpoint."""
        return self.left is not None and self.loaded is None

    def facts(self) -> dict[str, Any]:
        """Return the facts for ``run.json``, with ``parent`` if the run descends from another run."""
        foreign = [point for point in self.branch.ancestors if point.run != self.branch.run]
        parents = [{"run": point.run, "step": point.saved.step, "checkpoint": point.name} for point in foreign[-1:]]
        branch = {**self.branch.to_plain(), "resumed_at": self.path}
        branch |= {} if self.recovery is None else {"recovery": dict(self.recovery)}
        return {"id": self.branch.run, "branch": branch, **({"parent": parents[0]} if parents else {})}


def chosen(resume: bool | str | PathLike[str] | GoBack, run: RunSoFar) -> Start:
    """Return the start of a run.

    Args:
        resume: As for ``fit``; or a request of the run itself.
        run: What earlier starts have left.

    Raises:
        ValueError: `resume` is ``"auto"`` or the name of a checkpoint, and there is no directory.
        CheckpointError: The run has checkpoints, but none can be used; or the named checkpoint cannot be used.
    """
    if resume is False:
        return Start(Branch(uuid.uuid4().hex))
    if isinstance(resume, GoBack):
        return run.start_at(resume.path, recovery=resume.recovery)
    resume = "auto" if resume is True else resume
    if not isinstance(resume, str) or not (resume == "auto" or is_name(resume)):
        start = run.start_at(local_text(resume))
    elif run.directory is None:
        raise ValueError(
            f"resume={resume!r} looks for checkpoints in the directory of the run, and the run has none. Give directory=..., "
            "or leave out resume= to start a new run."
        )
    elif resume in ("auto", LAST):
        start = run.start_at_newest()
    else:
        start = run.start_at(find(run.directory.path, resume, run.reader.problem, run.elsewhere).path)
    start = replace(start, ended=run.ended, named=resume != "auto")
    if start.named and start.loaded is None:
        raise CheckpointError(none_to_continue(run.directory, start, f"is to continue with resume={resume!r}"))
    return _without_stop(start)


def chosen_on_all_ranks(
    driver: Driver, resume: bool | str | PathLike[str] | GoBack, directory: RecordedRun | None, elsewhere: Sequence[str]
) -> Start:
    """Return the start of a run that the main process chooses, with what this rank has read. Every rank must call this.

    Args:
        driver: The driver of the run.
        resume: As for ``fit``.
        directory: The run directory, on the main process.
        elsewhere: Further folders and URLs that the run saves to.

    Raises:
        CheckpointError: As `chosen`.
        DistributedError: The main process could not choose.
    """

    def choose(reader: Reader) -> tuple[Start, bool]:
        start = chosen(resume, RunSoFar(directory, elsewhere, reader))
        return replace(start, loaded=None), start.loaded is not None

    start, loaded = on_all_ranks(driver, choose)
    return _without_stop(replace(start, loaded=loaded))


def _without_stop(start: Start) -> Start:
    """Drop the stop that the checkpoint holds, unless a kill was faster than the stop."""
    if start.loaded is not None and (start.named or start.ended):
        start.loaded.state.get("requests", {}).pop("stop", None)
    return start


def none_to_continue(directory: RecordedRun | None, start: Start, why: str) -> str:
    """Return a text about a run that has no checkpoint to continue at."""
    where = "" if directory is None else f" in {str(directory.path)!r}"
    found = ":\n  " + "\n  ".join(start.lost) + "\n" if start.lost else ". "
    return (
        f"the run{where} {why}, but it has no checkpoint to continue at{found}Give another directory= to train from the start, "
        "or a checkpoint with fit(resume=PATH)."
    )


def opened(path: Path, resume: object, elsewhere: Iterable[str]) -> RunDirectory:
    """Return the files of a run directory, locked.

    Raises:
        CheckpointError: `resume` is the name of a checkpoint, and there is no directory that could hold it.
    """
    if isinstance(resume, str) and is_name(resume) and not path.exists() and not [*elsewhere]:
        raise CheckpointError(
            f"fit(resume={resume!r}) found no run: there is no {str(path)!r}.{meant_instead(path)} Give the directory= of the "
            'run, or resume="auto", which starts a run if there is none.'
        )
    return RunDirectory(path, resume=bool(resume))


@dataclass
class RunSoFar:
    """What earlier starts of a run have left: facts in its ``run.json``, checkpoints and rows."""

    directory: RecordedRun | None
    """The run directory, if there is one."""
    elsewhere: Sequence[str | PathLike[str]] = ()
    """Further folders and URLs that the run saves to."""
    reader: Reader = field(default_factory=Reader)
    """Reads checkpoints; see `on_all_ranks`."""

    @cached_property
    def catalogue(self) -> Catalogue:
        """The checkpoints of the run, in its directory and elsewhere.

        The present branch is that of ``run.json``; without one, that of the checkpoints in the directory.
        """
        own = [] if self.directory is None else [Store(self.directory.checkpoints)]
        if self.directory is not None and self.directory.previous is not None:
            branch = Branch.of(self._noted("branch"), str(self.directory.previous.get("id", "")))
        else:
            recorded = Catalogue(own).branch
            branch = recorded if recorded.run else Branch(uuid.uuid4().hex)
        return Catalogue([*own, *map(Store, self.elsewhere)], branch)

    @property
    def ended(self) -> str | None:
        """The outcome in ``run.json`` if the run is over; None if ``"auto"`` continues, as after an error or `TimeLimit`."""
        outcome = self._noted("outcome")
        return outcome["kind"] if outcome.get("kind") in OVER and not outcome.get(RESUMABLE) else None

    @property
    def recovery(self) -> Mapping[str, Any] | None:
        """The data of the rollback with which the present branch began; None if it began without one."""
        return self._noted("branch").get("recovery")

    @property
    def path(self) -> str | None:
        """The path of the checkpoint at which the present branch began; None if it began without one."""
        path = self._noted("branch").get("resumed_at")
        return None if path is None else str(path)

    @property
    def openable(self) -> str | None:
        """`path` if it may be opened: it is on this machine, or in one of the folders and URLs that the run saves to.

        Nothing else that a ``run.json`` names is opened: see `Catalogue.at`.
        """
        path = self.path
        if path is None or is_local(path) or path.rstrip("/").rpartition("/")[0] in map(local_text, self.elsewhere):
            return path
        return None

    @property
    def begun(self) -> list[Entry]:
        """The checkpoint at which the present branch began, if it is there and may be opened."""
        with suppress(CheckpointError):
            if self.openable is not None and (entry := checkpoint_at(self.openable)[1]) is not None:
                return [entry]
        return []

    @property
    def is_used(self) -> bool:
        """Whether an earlier start of the run left checkpoints, facts or rows."""
        directory = self.directory
        recorded = directory is not None and (directory.previous is not None or branch_files.has_rows(directory.path))
        return bool(self.catalogue.ranked) or recorded

    def start_at(self, path: str, *, recovery: Mapping[str, Any] | None = None) -> Start:
        """Return the start at a checkpoint: on a new branch, unless the checkpoint is the newest of the present branch.

        With `recovery`, a callback takes the run back: a new branch begins in any case.

        Raises:
            CheckpointError: The checkpoint cannot be used.
        """
        loaded, known = self.reader.read(entry_at(path, self.reader)), self.catalogue
        wrote, present = loaded.branch, known.branch
        point = wrote.point(loaded.name)
        rank = present.rank(point.saved, wrote)
        is_newest = (
            wrote.run == present.run
            and rank is not None
            and rank[0] == 1
            and not any(other > rank for other, _ in known.ranked)
        )
        if is_newest and recovery is None:
            return self._continuing(loaded)
        branch = Branch(present.run, known.next_number if self.is_used else 0, (*wrote.ancestors, point), loaded.name)
        return Start(branch, loaded, absolute_path(path), present.number if self.is_used else None, recovery)

    def start_at_newest(self) -> Start:
        """Return the start at the newest checkpoint of the present branch; a new start if the run has no checkpoint to lose.

        Raises:
            CheckpointError: No existing checkpoint can be used, and a new start would waste one.
        """
        branch, line = self.catalogue.branch, self.catalogue.line()
        own = [entry for entry in line if entry.branch is None or entry.branch.number == branch.number]
        # The checkpoint at which the branch began may be inexact, since the user named it.
        first = branch.ancestors[-1] if branch.ancestors else None
        known_first = () if first is None else (*self.begun, *line)
        begun = [entry for entry in known_first if entry.branch is not None and entry.branch.point(entry.name) == first]
        others = [entry for entry in line if entry not in own and entry not in begun]
        newest, skipped = first_usable(
            [*own, *begun, *others], lambda entry: self.reader.problem(entry, exact=entry not in begun)
        )
        for reason in dict.fromkeys(skipped):
            logger.warning("skipped a checkpoint: %s", reason)
        return self._without_checkpoint() if newest is None else self._continuing(self.reader.read(newest))

    def _continuing(self, loaded: Loaded) -> Start:
        return Start(replace(self.catalogue.branch, at=loaded.name), loaded, self.path, recovery=self.recovery)

    def _without_checkpoint(self) -> Start:
        """Return the start of a run without a checkpoint at which it can continue. Raises as `start_at_newest`."""
        known, branch, is_over = self.catalogue, self.catalogue.branch, self.ended is not None
        unusable = [_unusable(entry, self.reader) for _, entry in known.ranked]
        lost = tuple(why for why, _ in unusable)
        # After the end of the run only damage counts: there is no new start.
        wasted = {"damaged"} if is_over else {"damaged", "weights only", "abandoned"}
        if any(kind in wasted for _, kind in unusable):
            lines = "\n  ".join(lost)
            raise CheckpointError(
                f"none of the checkpoints in {known} can be used, and starting anew would waste them:\n  {lines}\n"
                "Repair or remove them, name one with fit(resume=PATH), or give another directory=."
            )
        if is_over:
            models = [entry for entry in known.line() if entry.manifest is not None and entry.manifest.get("weights_only")]
            model, _ = first_usable(models, self.reader.problem)
            return Start(branch, None if model is None else self.reader.read(model), self.path, lost=lost)
        if self.path is not None and (self.openable is None or branch.ancestors[-1].run != branch.run):
            assert self.directory is not None, "its run.json names the path"
            why = "can no longer be used" if self.openable else "is at a URL, which only fit(resume=URL) opens"
            raise CheckpointError(
                f"the run in {str(self.directory.path)!r} began at {self.path!r} and saved nothing itself, but that checkpoint "
                f"{why}. Name another one with fit(resume=PATH), or give another directory=."
            )
        if not self.is_used:
            return Start(branch)
        return Start(Branch(branch.run, known.next_number), None, None, branch.number, lost=lost)

    def _noted(self, name: str) -> Mapping[str, Any]:
        """Return an entry of ``run.json``; empty if it has none."""
        facts: Mapping[str, Any] = ((self.directory.previous if self.directory is not None else None) or {}).get(name) or {}
        return facts


def _unusable(entry: Entry, reader: Reader) -> tuple[str, str]:
    """Return the reason why a checkpoint cannot be used, if none on the line can, and its kind."""
    if problem := reader.problem(entry):
        return problem, "unfinished" if entry.is_unfinished else "damaged"
    manifest = entry.manifest or {}
    if problem := not_exact(entry.name, manifest):
        return problem, "weights only" if manifest.get("weights_only") else "not exact"
    return f"{entry.name}: abandoned when the run was rolled back", "abandoned"
