"""The boundaries between steps and between epochs: counters, records and what waits for a boundary.

And what a run notes there of its training data: the points of `BatchLog`, the size of its windows, the length of its loader.
"""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import chain
from typing import Any

from cadenza.engine.session import Loops, Session
from cadenza.engine.start_checks import warn_of_new_doubts
from cadenza.hooks.dispatch import Closer
from cadenza.loading import Consumed, Shard, resumable
from cadenza.loading.batch_log import Point, Segment, described
from cadenza.loading.resumable_base import changed, set_source
from cadenza.records.history import write_again
from cadenza.status.decisions import Outcome
from cadenza.status.formats import counted
from cadenza.status.masking import masked
from cadenza.status.progress import Accumulation, Progress

# -- the boundary ----------------------------------------------------------------------------------


def run_boundary(session: Session, *, closing: bool = False, after_step: bool = False) -> None:
    """Run the due evaluations, deliver the step's record, then carry out what waits for the step boundary.

    Every rank must call this. With `after_step`, wait for the other ranks only if this rank has a request, has logged a
    number or has this to do. With `closing`, run no evaluation.
    """
    acts = session.acts
    if (closing or session.due.run(session)) and after_step and session.sync.several:
        session.sync.end_step(acts=bool(acts.next or acts.later))
    elif session.sync.several:
        session.sync.synchronize()
    if not session.metrics.buffer.idle:
        session.metrics.deliver(session.run, session.progress.now(), wait=closing)
    session.cursor.at_boundary |= not closing
    acts.next, acts.later = acts.next + acts.later, []
    if session.sync.saves:  # on all ranks after the acts that they share, such as the comparison of the weights
        acts.next.append(Closer(None, partial(session.sync.save, session.savers)))
    while acts.next:
        session.hooks.carry_out([acts.next.pop(0)], session.run, "after_step")


def count_step(session: Session) -> None:
    """Count the step."""
    progress = session.progress
    progress.finish_step()
    session.metrics.losses.end_step()
    if progress.step >= session.step.next_change:
        change_windows(session)


def take_stop(session: Session) -> None:
    """Call ``on_stop``, once, if a stop was requested."""
    session.sync.leaves()  # a request of the last step of an epoch may not be known to all ranks yet
    if not session.metrics.buffer.idle:  # nor its record have been complete
        session.metrics.deliver(session.run, wait=False)
    stop = session.sync.take_stop()
    if stop is not None and session.outcome is None:
        session.end(Outcome(session.sync.requests.kind, stop.why))
        if session.sync.requests.back is None:
            session.hooks.on_stop(session.run, stop.why)


def count_epoch(session: Session) -> None:
    """Count the epoch if it is whole: all batches seen, or ended on request; and no evaluation before its end is due.

    A run that a limit ends inside an epoch is saved now, as at a stop: a longer run continues in this epoch.
    """
    progress, cursor = session.progress, session.cursor
    if session.due.state is not None:
        return
    if cursor.exhausted or session.sync.requests.end_epoch or progress.batch_in_epoch == progress.batches_per_epoch:
        progress.finish_epoch()
        change_windows(session)
        session.hooks.refresh_schedules(progress)
        cursor.at_boundary = False  # until the hooks of on_epoch_end are called
    elif session.outcome is None:
        for saver in session.savers:
            saver.request("the end of the run")
    ends = progress.finished or session.outcome is not None
    if session.loop is Loops.FIT and session.advises and (ends or not progress.epoch & (progress.epoch - 1)):
        # Not after each epoch but after 1, 2, 4 ... and the last, as it takes time. Hooks may leave modes that train nothing.
        warn_of_new_doubts(session)


def leave_epoch(session: Session) -> None:
    """Reach the boundary after ``on_epoch_end``. A request for the end of this epoch has nothing left to end."""
    session.due.run(session)
    session.sync.requests.drop_epoch()
    session.metrics.losses.end_epoch()
    run_boundary(session)


def fail(session: Session, raised: BaseException) -> BaseException:
    """End the run with an error; return it, or that of the rank that failed first."""
    error = session.driver.first_error(raised)
    session.end(session.metrics.losses.failed(error))
    return error


def close(session: Session) -> None:
    """Deliver the last records, then close what callbacks opened, the last one first. An earlier error stays the first."""
    session.sync.close()
    finish = partial(run_boundary, session, closing=True)
    opened = session.acts.closers
    closers = iter(lambda: opened.pop() if opened else None, None)  # also those that a closer adds
    # Twice first, for values that are logged while the last record is delivered; once more for those logged in closing.
    session.hooks.carry_out(chain((finish, finish), closers, (finish, session.metrics.close)), session.run)
    for block in session.blocks.open:
        session.warn(f"the run ended while saves were blocked by {block}. Leave the context of run.block_saves() before")


# -- the training data -----------------------------------------------------------------------------


def open_loader(session: Session, past: Consumed = (), shard: Shard | None = None) -> None:
    """Give the training loader a position; `past` is what other ranks did of the current epoch.

    `shard` is what this rank reads; None: its shard of all data.
    """
    set_source(None)
    driver, cursor = session.driver, session.cursor
    shard, pin = (shard or driver.data_shard()).resumed(past), driver.device.type == "cuda"
    options: dict[str, Any] = {"replay": cursor.replay, "shard": shard, "pin": pin, "permuted": cursor.permuted}
    cursor.source = changed(resumable(session.loader, session.data_seed, **options), cursor.change)


def begin(session: Session) -> None:
    """Set the size of the windows, and note where the run begins or continues, and with which loader.

    A loop that brings its own data has no positions.
    """
    if isinstance(session.accumulate, Accumulation):
        session.step.resize(session.accumulate.batches(session.progress, session.progress))
        session.step.next_change = session.accumulate.next_step(session.progress)
    if not session.progress.has_epochs:
        return
    driver, cursor = session.driver, session.cursor
    dealt, consumed = driver.data_shard().share_data, cursor.source.shard.consumed
    loader = described(session.loader, driver.data_shard().rank)
    segment = Segment(session.data_seed, cursor.permuted, cursor.source.shard.world_size, dealt, consumed, loader)
    cursor.course.go_on(segment, _point(session))
    named = {"name": type(session.loader).__name__, **loader}
    named.pop("why", None)  # why its samples cannot be named
    session.arguments = {**session.arguments, "loader": named}  # not earlier: callbacks may replace the loader
    _write(session, arguments=session.arguments)


def note_point(session: Session) -> None:
    """Note the present step boundary, if it does not follow from the last point."""
    if session.cursor.course.note(_point(session)):
        _write(session)


def _point(session: Session) -> Point:
    at, size = session.progress, session.step.window.size
    return Point(at.step, at.epoch, at.batch_in_epoch, at.batch, size, at.batches_per_epoch, at.batches_per_whole_epoch)


def _write(session: Session, **facts: Any) -> None:
    if session.files is not None:
        session.files.note({"data": session.cursor.course.to_plain(), **facts})


def change_windows(session: Session) -> None:
    """Change the size of the windows if a point is reached: between two steps. The decision is the same on all ranks."""
    accumulate, progress, step = session.accumulate, session.progress, session.step
    if not isinstance(accumulate, Accumulation):
        step.next_change = math.inf
        return
    before, now = step.window.size, accumulate.batches(progress, progress)
    step.next_change = accumulate.next_step(progress)
    if now != before:
        step.resize(now)
        why = f"from step {progress.step + 1} on, a step has {counted(now, 'batch')} instead of {before}"
        note_point(session)
        session.decide("accumulation changed", why, who="the trainer", data={"before": before, "batches": now})


def check_length(session: Session) -> None:
    """Compare a whole epoch with the length of the loader, and correct the length. All ranks find the same number."""
    progress = session.progress
    expected, found = progress.batches_per_epoch, progress.batch_in_epoch
    taken_over = expected != progress.batches_per_whole_epoch  # another number of ranks began this epoch
    if not session.cursor.exhausted or expected is None or expected == found or taken_over:
        return
    first = progress.batches_said == expected
    progress.correct(found)
    ranks = " on each rank" if session.driver.world_size > 1 else ""
    said = f"{counted(expected, 'batch')}{ranks}"
    what = f"the length of the training loader says {said}, but epoch {progress.epoch + 1} had {found}"
    session.decide("length corrected", what, who="the run", data={"expected_batches": expected, "batches": found})
    if first and session.driver.is_main:
        session.warn(
            f"{what}. From now on, fractions of an epoch and the length of the run are computed with {found}. Schedules and "
            f"warm-ups that were made for {expected} do not change. Make the loader's __len__ return the right "
            "number, or remove it."
        )


def no_batches(progress: Progress) -> str:
    """Return the message of an epoch without a batch."""
    again = "" if progress.epoch == 0 else " again: an iterator is used up after one pass, a loader is not"
    return (
        f"the training loader gave no batch in epoch {progress.epoch + 1}. Give one that has at least one batch"
        f"{again}; with drop_last=True a data set smaller than a batch has none."
    )


# -- a run directory that was moved or deleted while its run goes on -------------------------------


NOTE = "MOVED.txt"
"""The file in the new directory that says what happened."""


def recreate_directory(session: Session) -> None:
    """Make the directory of a run again at its path, with the rows and decisions that are in memory. Say it once.

    If that is not possible, nothing is said here: logs and checkpoints report that they cannot be written, and wait.
    """
    files = session.files
    assert files is not None, "the directory of the main process"
    try:
        files.recreate()
    except OSError:
        return
    rows = write_again(files.path / "metrics.jsonl", session.metrics.history)
    decisions = files.path / "decisions.jsonl"
    there = set(decisions.read_text(encoding="utf-8").splitlines()) if decisions.exists() else set()
    for decision in session.run.decisions:
        if json.dumps(masked(decision.to_dict())) not in there:
            files.add_decision(decision.to_dict())
    text = (
        f"the directory {str(files.path)!r} was moved or deleted while its run was at {session.progress.now()}. It was made "
        f"again, and the run goes on in it. {counted(rows, 'row')} of metrics.jsonl and the decisions of this process were "
        "written from memory. Earlier checkpoints, console.log, and files that sinks hold open are in the moved directory, if "
        "there is one"
    )
    (files.path / NOTE).write_text(f"{text[0].upper()}{text[1:]}.\n", encoding="utf-8")
    session.warn(text)
