"""Schedules that are due each time in a part of the run, points of a run, and how arguments with schedules are shown."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cadenza.errors import ScheduleError
from cadenza.hooks.counting import NEVER, STEP_END, Bound, Counting, Reading
from cadenza.hooks.length import Length, Unit, check_length, too_late
from cadenza.hooks.schedule import At, Every, OfLength, Schedule, Steady
from cadenza.status.counting import plural
from cadenza.status.shown import brief

if TYPE_CHECKING:
    from cadenza.status.progress import Progress


Edge = tuple[str, Any] | None
"""A unit, and the point of the run in it; None for the start, or the end, of the run."""


class _Window(Schedule):
    """A schedule that is due each time behind one point of the run and not behind another one."""

    __slots__ = ()

    def due(self, now: Reading, before: Reading) -> bool:
        start, end = self._edges(now)
        return (start is None or _behind(now, start)) and not (end is not None and _behind(now, end))

    def steady(self, now: Reading) -> Steady:
        start, end = self._edges(now)
        if end is not None and _behind(now, end):
            return Steady(False, NEVER)
        if start is not None and not _behind(now, start):
            return Steady(False, now.bound(*start, window=True))
        return Steady(True, NEVER if end is None else now.bound(*end, window=True))

    @abstractmethod
    def _edges(self, now: Reading) -> tuple[Edge, Edge]:
        """Return the points after which, and until which, it is due."""


def _behind(now: Reading, edge: tuple[str, Any]) -> bool:
    """Return whether the moment belongs to a later step, epoch, and so on."""
    unit, point = edge
    return bool(now.inside(unit) > point)


class First(_Window, OfLength):
    """Due each time in the first part of a run.

    Args:
        length: The length of the part, such as ``"10 steps"`` or ``"1 epoch"``.

    Raises:
        ScheduleError: `length` cannot be read.

    >>> print(First("10 steps"), "-", First("1 epoch"))
    in the first 10 steps - in the first epoch
    """

    __slots__ = ()

    _name: ClassVar[str] = "first"

    def _edges(self, now: Reading) -> tuple[Edge, Edge]:
        return None, self.length.point

    def __str__(self) -> str:
        return f"in the {self._name} {self.length}"


class Last(First):
    """Due each time in the last part of a run of known length.

    Args:
        length: The length of the part, such as ``"1 epoch"``, ``"100 steps"`` or ``"10%"``.

    Raises:
        ScheduleError: `length` cannot be read; or, at the start of a run, its end is not known in this unit.

    >>> print(Last("2 epochs"), "-", Last("10%"))
    in the last 2 epochs - in the last 10%
    """

    __slots__ = ()

    _name: ClassVar[str] = "last"

    def check(self, limits: Progress) -> None:
        super().check(limits)
        unit = "batch" if self.unit == "epoch" and not self.length.whole else self.unit
        if unit == "%":
            return
        if unit in ("epoch", "step", "batch", "token"):
            if limits.total(unit) is not None:
                return
            cure = f"Give Trainer one of max_epochs= and max_steps=, and a loader with __len__; or use {type(self).__name__}"
        else:
            cure = "Use"
        raise ScheduleError(
            f"'{self}' needs a run that knows its length in {plural(unit) if len(unit) > 1 else 'seconds'}; this one does not. "
            f'{cure} another unit, such as "100 steps" or "1 epoch".'
        )

    def _edges(self, now: Reading) -> tuple[Edge, Edge]:
        unit, count = self.length.point
        limits = now.limits
        if unit == "%":
            return (unit, 100 - count), None
        if unit == "fraction":
            unit, count = "batch", count * (limits.batches_per_whole_epoch or 1)
        total = limits.begun("epoch") if unit == "epoch" else limits.total(unit)  # type: ignore[arg-type]  # `check` refuses others
        return (unit, math.inf if total is None else total - count), None


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Between(_Window):
    """Due each time after `start` and until `end`, which is included: ``(start, end]``.

    Args:
        start: The length of the run before the window, such as ``"1000 steps"``; 0 for its start.
        end: The length of the run at the end of the window.

    Raises:
        ScheduleError: `start` or `end` cannot be read, or `end` is not after `start`.

    >>> print(Between("1000 steps", "5000 steps"), "-", Between("1 epoch", "50%"))
    between 1000 and 5000 steps - between 1 epoch and 50%
    """

    start: Length
    end: Length

    def __init__(self, start: int | str | Length, end: int | str | Length) -> None:
        first, last = Length.parse(start, zero=True), Length.parse(end)
        if first.unit == last.unit and first.count >= last.count:
            raise ScheduleError(f"Between({first.text!r}, {last.text!r}) is empty: the second point must be after the first.")
        object.__setattr__(self, "start", first)
        object.__setattr__(self, "end", last)

    def counting(self, unit: Unit) -> Between:
        return Between(self.start.of(unit), self.end.of(unit))

    def check(self, limits: Progress) -> None:
        check_length(self, self.start, limits)
        check_length(self, self.end, limits)

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        start = self.start
        if not start.whole or start.unit not in ("step", "batch", "epoch"):
            return too_late(start, limits, accumulate)
        return too_late(replace(start, count=start.count + 1), limits, accumulate, begun=start.unit == "epoch")

    def _edges(self, now: Reading) -> tuple[Edge, Edge]:
        return self.start.point, self.end.point

    def __repr__(self) -> str:
        return f"Between({self.start.text!r}, {self.end.text!r})"

    def __str__(self) -> str:
        start: object = self.start.text
        if self.start.unit == self.end.unit and self.end.unit not in ("s", "%"):
            start = f"{float(self.start.count):g}" if not self.start.whole else self.start.count
        return f"between {start} and {self.end.text}"


@dataclass(frozen=True, slots=True)
class Until(Schedule):
    """Each time while fewer steps than `end` returns are complete; then never again."""

    end: Callable[[], float]

    def due(self, now: Reading, before: Reading) -> bool:
        return now.counts["step"] < self.end()

    def steady(self, now: Reading) -> Steady:
        due, end = self.due(now, now), self.end()
        return Steady(due, Bound("step", end) if due else NEVER)

    def __repr__(self) -> str:
        return f"Until({brief(self.end)})"

    def __str__(self) -> str:
        return "in its first steps"


def lengths_in(schedule: Schedule) -> list[Length] | None:
    """Return all lengths in a schedule; None if it has other parts."""
    found: list[Length] = []
    for leaf in schedule.leaves():
        own = [value for one in fields(leaf) if isinstance(value := getattr(leaf, one.name), Length)]  # type: ignore[arg-type]
        if not own:
            return None
        found += own
    return found


def point(given: str | At) -> At:
    """Return a point of the run that is the same after a resume.

    Raises:
        ScheduleError: `given` is no point, or counts what a resumed run counts anew.

    >>> point("3 epochs")
    At('3 epochs')
    >>> point("10 min")
    Traceback (most recent call last):
        ...
    cadenza.errors.ScheduleError: '10 min' is no point of a run that is the same after a resume: expected epochs, steps, \
batches, samples, tokens or "10%", such as "3 epochs"
    """
    at = given if isinstance(given, At) else At(given)
    if at.unit in ("s", "time", ""):
        raise ScheduleError(
            f"{at.length.text!r} is no point of a run that is the same after a resume: expected epochs, steps, batches, "
            'samples, tokens or "10%", such as "3 epochs"'
        )
    return at


def steps_in(given: int | str, expected: str) -> int:
    """Return the number of steps of an argument such as ``"100 steps"`` or 100.

    Args:
        given: The argument.
        expected: What it must be, for the message, with its name.

    Raises:
        ValueError: It counts something else than whole steps.

    >>> steps_in("100 steps", "back must be a number of steps")
    100
    """
    length = Every(given).length.of("step")
    if length.unit != "step" or not length.whole:
        raise ValueError(f"{expected}; got {given!r}")
    return int(length.count)


def brief_setting(value: object) -> str:
    """Return the text of an argument in the ``repr`` of its owner: an interval is shown as ``every=`` takes it."""
    if isinstance(value, Length) or type(value) is Every:
        return repr((value if isinstance(value, Length) else value.length).text)
    return brief(value)
