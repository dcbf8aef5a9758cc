"""Continue a run, start it again, or find that it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard
from weakref import proxy

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.other_ranks import Written
from cadenza.checkpoint.parts import load_callbacks, placed
from cadenza.checkpoint.snapshot import check_whole
from cadenza.checkpoint.starting import Start, chosen, none_to_continue
from cadenza.checkpoint.store import Loaded
from cadenza.checkpoint.store.files import LAST
from cadenza.engine import boundary
from cadenza.engine.course import Beginning
from cadenza.engine.plan import argument_changes, plan_changes
from cadenza.engine.session import Session
from cadenza.engine.start_checks import main_only, tell
from cadenza.errors import CheckpointError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.held_weights import ReplacesWeights
from cadenza.loading import resumable
from cadenza.loading.shards import Shard
from cadenza.optim.settings import limits_of
from cadenza.records import branch_files
from cadenza.records.directory import RecordedRun, RunDirectory
from cadenza.records.history import History, write_again
from cadenza.records.reading import read_records
from cadenza.status.decisions import Outcome
from cadenza.status.folding import printable
from cadenza.status.formats import clock, counted
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
        session.state.update(placed(session, loaded.state.get("state", {})))
        own = loaded.by_rank[min(session.driver.rank, len(loaded.by_rank) - 1)]
        load_callbacks(session, loaded.name, own.get("callbacks of the rank", {}))
        states = placed(session, loaded.state.get("callbacks", {}))
        for name, callback in session.hooks.callbacks.items():
            if name in states and isinstance(callback, ReplacesWeights):
                callback.put_in_place_again(session.run, states[name])
    session.progress.begin(reached, session.progress.batches_per_epoch)
    session.end(outcome)
    if session.is_main:
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
    reached = [f"{name}={most}" for name, most in limits_of(progress).items() if most is not None and done[name] >= most]
    return (
        f". To continue, increase {' and '.join(reached)}" if reached else f'. fit(resume="{LAST}") continues where it stopped'
    )


def tell_how_to_go_on(session: Session, resume: object) -> None:
    """Tell, after a run that a signal ended, where it is saved and how it goes on."""
    saved = next((one.data for one in reversed(session.decisions) if one.what == "saved"), None)
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
        previous = {name: one for name in ("branch", "parent") if (one := (directory.previous or {}).get(name)) is not None}
        known = {"data": data} if not start.is_anew and (data := (directory.previous or {}).get("data")) else {}
        directory.when_gone = partial(boundary.make_again, proxy(session))
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
        tell(session, f"resumed at {loaded.name}: step {now.step}, epoch {now.epoch + 1}; it was written {ago} ago")
    _tell_plan_changes(session, directory)
    own = loaded.branch.run == start.branch.run
    if directory is not None and own and (lost := write_again(directory.path / "metrics.jsonl", session.metrics.history)):
        _tell_lost_records(session, lost, loaded.name)
    if start.rolls_back:
        rows = f"; its rows are in {', '.join(kept)}" if kept else ""
        why = f"branch {start.left} is abandoned after {loaded.name}{rows}"
        data = {"branch": start.left, "checkpoint": loaded.name}
        session.decide("rolled back", why, who="the trainer", data=data)


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
    elsewhere: Iterable[str | PathLike[str]],
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
    start = chosen(resume, recorded, elsewhere)
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
