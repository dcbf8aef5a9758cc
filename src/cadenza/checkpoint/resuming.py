"""Continue a run, start it again, or find that it is over."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any
from weakref import proxy

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.finding import find, is_name
from cadenza.checkpoint.reader import Reader, on_all_ranks
from cadenza.checkpoint.starting import Start, at_newest, at_path, outcome_in
from cadenza.checkpoint.store import Branch, Loaded
from cadenza.drivers import Driver
from cadenza.engine import lost_directory, rank_checks
from cadenza.engine.plan_changes import plan_changes
from cadenza.engine.session import Session
from cadenza.errors import CheckpointError
from cadenza.files.paths import local_text
from cadenza.hooks.held_weights import ReplacesWeights
from cadenza.records import branch_files
from cadenza.records.directory import OVER, RecordedRun, RunDirectory
from cadenza.records.history import History
from cadenza.records.lost_rows import write_again
from cadenza.records.reading import read_records
from cadenza.status.counting import counted
from cadenza.status.decisions import Outcome
from cadenza.status.folding import printable
from cadenza.status.progress import Counters, Progress
from cadenza.status.requests import GoBack

logger: logging.Logger = logging.getLogger("cadenza")


def chosen(
    resume: bool | str | PathLike[str] | GoBack,
    directory: RecordedRun | None,
    elsewhere: Iterable[str | PathLike[str]] = (),
    reader: Reader | None = None,
) -> Start:
    """Return the start of a run.

    Args:
        resume: As for ``fit``; or a request of the run itself.
        directory: The run directory, if there is one.
        elsewhere: Further folders and URLs that the run saves to.
        reader: Reads checkpoints; see `on_all_ranks`.

    Raises:
        ValueError: `resume` is ``"auto"`` or the name of a checkpoint, and there is no directory.
        CheckpointError: The run has checkpoints, but none can be used; or the checkpoint at the path cannot be used.
    """
    if resume is False:
        return Start(Branch(uuid.uuid4().hex))
    if resume is True or resume == "auto":
        return at_newest(_given(directory, "auto"), elsewhere, reader)
    reader = reader or Reader()
    if isinstance(resume, GoBack):
        return at_path(resume.path, directory, elsewhere, reader, recovery=resume.recovery)
    if isinstance(resume, str) and is_name(resume):
        found = find(_given(directory, resume).path, resume, problem=reader.problem)
        return at_path(found.path, directory, elsewhere, reader)
    return at_path(local_text(resume), directory, elsewhere, reader)


def chosen_on_all_ranks(
    driver: Driver, resume: bool | str | PathLike[str] | GoBack, directory: RecordedRun | None, elsewhere: Iterable[str]
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
        start = chosen(resume, directory, elsewhere, reader)
        return replace(start, loaded=None), start.loaded is not None

    start, loaded = on_all_ranks(driver, choose)
    return replace(start, loaded=loaded)


def _given(directory: RecordedRun | None, resume: str) -> RecordedRun:
    if directory is None:
        raise ValueError(
            f"resume={resume!r} looks for checkpoints in the directory of the run, and the run has none. Give directory=..., "
            "or leave out resume= to start a new run."
        )
    return directory


def is_over(directory: RecordedRun | None, limits: Progress, start: Start) -> bool:
    """Return whether the run has ended, and its limits were not raised. A run that rolls back is not over.

    Raises:
        CheckpointError: The run ended and its limits were raised, but it has no checkpoint to continue at.
    """
    kind = outcome_in(directory)
    if directory is None or kind not in OVER or start.left is not None:
        return False
    now = _reached(directory, start.loaded)
    limits.begin(now, limits.batches_per_epoch)
    if kind == "stopped" or limits.finished:
        return True
    if not _is_whole(start.loaded):
        found = "\n  ".join(start.lost) or "there is none"
        raise CheckpointError(
            f"the run in {str(directory.path)!r} finished at {now}, and a limit asks for more, but it has no "
            f"checkpoint to continue at:\n  {found}\nGive another directory= to train from the start, or a checkpoint with "
            "fit(resume=PATH)."
        )
    return False


def as_it_ended(session: Session, directory: RunDirectory | None, start: Start) -> Session:
    """Restore the final state of a run that is over, as far as it was saved. Every rank must call this."""
    loaded = start.loaded
    ended = session.driver.broadcast(None if directory is None else _ended(directory, loaded, session.metrics.history.limit))
    session.metrics.history, reached, outcome = ended
    if loaded is not None:
        snapshot.load_model(session, loaded)
        session.extra_parameters.begin(session.run)
        session.extra_parameters.load_state_dict(loaded.state.get("outside", {}))
        session.state.update(snapshot.placed(session, loaded.state.get("state", {})))
        snapshot.restore_own(session, loaded)
        states = snapshot.placed(session, loaded.state.get("callbacks", {}))
        for name, callback in session.hooks.callbacks.items():
            if name in states and isinstance(callback, ReplacesWeights):
                callback.put_in_place_again(session.run, states[name])
    session.progress.begin(reached, session.progress.batches_per_epoch)
    session.end(outcome)
    if session.is_main:
        text = "nothing to do: the run in %s is over (%s: %s)"
        logger.warning(text, session.directory, printable(outcome.kind), printable(outcome.reason))
        if loaded is None:
            logger.warning("no checkpoint of the run in %s is there, so the model does not have its weights", session.directory)
        elif not _is_whole(loaded):
            logger.warning("the model has the weights of %s, which holds weights only", loaded.name)
    return session


def begin(session: Session, directory: RunDirectory | None, start: Start, facts: Mapping[str, Any]) -> None:
    """Write ``run.json``. If the run starts again, copy the rows of its first attempt and warn."""
    kept = []
    if directory is not None:
        if start.is_anew and start.left is not None:
            kept = branch_files.keep(directory.path, start.left)
            branch_files.drop_old(directory.path)  # no checkpoint needs them, else there is no new start
        # A rollback is written only after the checkpoint has been restored.
        previous = {name: one for name in ("branch", "parent") if (one := (directory.previous or {}).get(name)) is not None}
        known = {"data": data} if not start.is_anew and (data := (directory.previous or {}).get("data")) else {}
        directory.when_gone = partial(lost_directory.make_again, proxy(session))
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
    kept = rank_checks.main_only(session.driver, lambda: [] if directory is None else _take_rows(directory, start, loaded))
    session.decide("resumed", f"at {loaded.name}", who="the trainer", data={"checkpoint": loaded.name})
    _tell_plan_changes(session, directory)
    own = Branch.of(loaded.manifest, loaded.manifest["run"]).run == start.branch.run
    if directory is not None and own and (lost := write_again(directory.path / "metrics.jsonl", session.metrics.history)):
        told = (
            f"{counted(lost, 'record')} of metrics.jsonl were lost, for example by a power cut, and are written again from "
            f"{loaded.name}"
        )
        session.decide("records restored", told, who="the trainer", data={"records": lost, "checkpoint": loaded.name})
        session.warn(f"{told}{', as far as its thinned history has them' if session.metrics.history.thinned else ''}")
    if start.rolls_back:
        rows = f"; its rows are in {', '.join(kept)}" if kept else ""
        data = {"branch": start.left, "checkpoint": loaded.name}
        session.decide(
            "rolled back", f"branch {start.left} is abandoned after {loaded.name}{rows}", who="the trainer", data=data
        )


def _tell_plan_changes(session: Session, directory: RunDirectory | None) -> None:
    """Record how the plan differs from the plan of the run so far. Every rank must call this."""
    plans = None if directory is None else directory.plans
    changes: list[str] = session.driver.broadcast(plan_changes(*plans) if plans else [])
    if changes:
        told = f"since the run so far: {'; '.join(changes)}"
        session.decide("plan changed", told, who="the trainer", data={"changes": changes})
        if any(not line[2:].startswith("fit: ") for line in changes):
            session.warn(f"the plan has changed {told}")


def _take_rows(directory: RunDirectory, start: Start, loaded: Loaded) -> list[str]:
    """Restore the rows and media of the checkpoint. Write a rollback to ``run.json`` before the new branch writes anything.

    A continued run writes dropped rows and media again. Those of an abandoned branch are not written again, so they are copied.
    """
    wrote = Branch.of(loaded.manifest, loaded.manifest["run"])
    own = wrote.run == start.branch.run
    offsets = loaded.state["offsets"] if own else {}  # the offsets of another session belong to its own files
    step = loaded.manifest["step"] if own else -1
    kept = []
    directory.goes_on()
    if start.rolls_back and start.left is not None:
        kept = branch_files.keep(directory.path, start.left)
        directory.note(start.facts())
    if own and wrote.number != start.branch.number:
        branch_files.take_back(directory.path, wrote.number, offsets, step)
    else:
        directory.cut(offsets, step)
    return kept


def _ended(directory: RunDirectory, loaded: Loaded | None, limit: int) -> tuple[History, Counters, Outcome]:
    previous = directory.previous or {}
    if loaded is not None and _is_whole(loaded):
        history = History.from_state(loaded.state["history"], limit)
    else:
        history = History(limit)
        for record in read_records(directory.path / "metrics.jsonl"):
            history.add(record)
    return history, _reached(directory, loaded), Outcome(previous["outcome"]["kind"], previous["outcome"]["reason"])


def _reached(directory: RecordedRun, loaded: Loaded | None) -> Counters:
    """Return the last counters of a run: from its last checkpoint, else from ``run.json``, else from the last record."""
    if loaded is not None and _is_whole(loaded):
        return Counters(**loaded.state["progress"])
    told = (directory.previous or {}).get("progress")
    if told is not None:
        return Counters(**told)
    return max((record.at for record in read_records(directory.path / "metrics.jsonl")), key=_batch, default=Counters())


def _batch(at: Counters) -> int:
    return at.batch


def _is_whole(loaded: Loaded | None) -> bool:
    """Return whether a checkpoint holds the whole state. Else it holds weights only."""
    return loaded is not None and "config" in loaded.state
