"""Batches in a step: reading ``Trainer(accumulate=...)``, and changes of their number at the boundary between two steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

from cadenza.engine import data_points
from cadenza.engine.arguments import checked_length
from cadenza.engine.data_points import Reading
from cadenza.errors import ScheduleError
from cadenza.hooks.counting import kept
from cadenza.hooks.length import Length
from cadenza.status.formats import counted
from cadenza.status.progress import Accumulation, Change, Progress

POINTS = '2000 (steps), "2000 steps", "3 epochs", "0.5 epoch", "500 batches", "50000 samples", "1e9 tokens", "50%"'
"""The forms of a point, for messages."""


class Accumulating(Reading, Protocol):
    """The session, as far as its accumulation windows are sized."""

    accumulate: int

    def decide(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> object: ...


Accumulate = int | Mapping[int | str, int]
"""Batches in a step: a number, or a mapping of points of the run to numbers, such as ``{0: 1, "2000 steps": 4}``."""


def checked_accumulate(accumulate: object, step_fn: object) -> int:
    """Return the number of batches in a step; an `Accumulation` if it changes during the run.

    Raises:
        TypeError: It is neither a whole number nor a mapping of points to whole numbers.
        ValueError: A number is below 1, points are not in order, or a ``step_fn`` accumulates itself.
        ScheduleError: A point cannot be read.

    >>> checked_accumulate({0: 1, "2000 steps": 4, "50%": 8}, None)
    {'0': 1, '2000 steps': 4, '50%': 8}
    """
    if isinstance(accumulate, Accumulation):
        checked: int = accumulate
    else:
        checked = checked_numbers("accumulate", accumulate)
    if step_fn is not None and checked != 1:
        raise ValueError(f"a step_fn does its own accumulation: expected accumulate=1; got {accumulate}")
    return checked


def checked_numbers(name: str, given: object) -> int:
    """Return a whole number, at least 1; an `Accumulation` if it changes at points of the run."""
    if not isinstance(given, Mapping):
        return checked_length(name, given)
    first, changes = 1, list[Change]()
    for point, value in given.items():
        batches = checked_length(f"{name}[{point!r}]", value)
        if point in (0, "0"):
            if changes:
                raise ValueError(f"{name} must have its points in order, 0 first; got {dict(given)}")
            first = batches
        else:
            changes.append(_change(point, batches))
    for earlier, later in pairwise(changes):
        if earlier.unit == later.unit and earlier.count >= later.count:
            raise ValueError(f"{name} must have its points in order; got {earlier.text!r} before {later.text!r}")
    return Accumulation(first, changes) if changes else first


def _change(point: object, batches: int) -> Change:
    """Read a point of the run."""
    length = Length.parse(point, POINTS).of("step")
    if not kept(length.unit):
        raise ScheduleError(f"{point!r} is no point of a run that is the same after a resume. Use one of: {POINTS}")
    return Change(length.count, length.unit, batches, str(length.text))  # type: ignore[arg-type]


def plain(accumulate: Any) -> Any:
    """Return an `Accumulation` as plain data, numbers by the text of their point; anything else unchanged."""
    return accumulate.plain() if isinstance(accumulate, Accumulation) else accumulate


def units_of(accumulate: int, limits: Progress) -> set[str]:
    """Return the units of the points at which the number of batches in a step changes."""
    units: set[str] = {one.unit for one in accumulate.changes} if isinstance(accumulate, Accumulation) else set()
    return units | {"token"} if "%" in units and limits.max_tokens is not None else units


def check(name: str, accumulate: int, limits: Progress) -> None:
    """Raise `ValueError` for a point that needs a loader of known length."""
    for change in accumulate.changes if isinstance(accumulate, Accumulation) else ():
        if change.unit == "epoch" and change.count != int(change.count) and limits.batches_per_whole_epoch is None:
            raise ValueError(
                f"{name} changes at {change.text!r}, which needs a loader that knows its length (has __len__); this one "
                'does not. Use "steps", "batches" or "samples".'
            )


def never(accumulate: int, limits: Progress) -> Iterator[str]:
    """Yield a warning for each change that the run is too short for."""
    for change in accumulate.changes if isinstance(accumulate, Accumulation) else ():
        if change.unit in ("step", "batch", "epoch"):
            total = limits.total(change.unit, accumulate)
            if total is not None and change.count >= total:
                yield (
                    f"accumulate={change.batches} from {change.text} on never takes effect: the run ends after "
                    f"{counted(total, change.unit)}"
                )


def begin(session: Accumulating) -> None:
    """Set the size of the windows when a run starts, or continues."""
    if isinstance(session.accumulate, Accumulation):
        session.step.resize(session.accumulate.batches(session.progress, session.progress))
        session.step.next_change = session.accumulate.next_step(session.progress)


def change(session: Accumulating) -> None:
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
        data_points.look(session)
        session.decide("accumulation changed", why, who="the trainer", data={"before": before, "batches": now})
