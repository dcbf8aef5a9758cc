"""Keep the points of `DataCourse` during a run: at its start, at changes of ``accumulate``, and after unexpected epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from cadenza.drivers.base import Driver
from cadenza.engine.step_state import Cursor, StepState
from cadenza.loading.data_course import Point, Segment, described
from cadenza.records.directory import RunDirectory
from cadenza.status.progress import Progress


class Reading(Protocol):
    """The session, as far as it reads data."""

    arguments: Mapping[str, Any]
    cursor: Cursor
    data_seed: int
    driver: Driver
    files: RunDirectory | None
    loader: Iterable[Any]
    progress: Progress
    step: StepState


def begin(session: Reading) -> None:
    """Note where the run begins or continues, before the first step, and with which loader.

    A loop that brings its own data has no positions.
    """
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


def look(session: Reading) -> None:
    """Note the present step boundary, if it does not follow from the last point."""
    if session.cursor.course.note(_point(session)):
        _write(session)


def _point(session: Reading) -> Point:
    at, size = session.progress, session.step.window.size
    return Point(at.step, at.epoch, at.batch_in_epoch, at.batch, size, at.batches_per_epoch, at.batches_per_whole_epoch)


def _write(session: Reading, **facts: Any) -> None:
    if session.files is not None:
        session.files.note({"data": session.cursor.course.to_plain(), **facts})
