"""What a run notes of its training data: the points of `DataCourse`, the size of its windows, the length of its loader."""

from __future__ import annotations

import math
from typing import Any

from cadenza.engine.session import Session
from cadenza.loading.data_course import Point, Segment
from cadenza.loading.described import described
from cadenza.status.accumulation import Accumulation
from cadenza.status.counting import counted
from cadenza.status.progress import Progress


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
    segment = Segment(session.data_seed, cursor.permuted, driver.data_world_size, dealt, consumed, loader)
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
    if first and session.is_main:
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
