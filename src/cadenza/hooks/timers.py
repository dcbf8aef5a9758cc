"""Timers: the state of schedules in one run. `cadenza.hooks.schedule` says what their answers mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.hooks.length import Counted
    from cadenza.run import Run

SELDOM = 10  # steps: a listener that is due this seldom is not asked in between
_SELDOM_S = 10.0  # seconds: the same for the clock, which is then looked at about once a second


class Timer(ABC):
    """A schedule in one run."""

    __slots__ = ()

    seldom = False
    """Whether `next_step` can be many steps ahead."""

    @abstractmethod
    def due(self, run: Run) -> bool:
        """Return whether the listener is called now. The next answer then counts from here."""

    def next_step(self, at: Progress, accumulate: int) -> float:
        """Return how many steps are complete when `due` must be asked again, counted from `at`; infinite for never.

        Args:
            at: The counters now.
            accumulate: The most batches that a step has.
        """
        return 0

    def next_pulse(self, at: Progress, accumulate: int) -> float:
        """Return the same for the next answer that changes this timer; infinite if none does."""
        return math.inf

    def would_be_due(self, at: Progress) -> bool:
        """Return what `due` would answer, and change nothing."""
        return False

    def make_due(self, at: Progress) -> None:  # noqa: B027  # a function of the user is asked in any case
        """Have `due` return True the next time: for a moment that continues, or was waited for, before a resume."""

    def waits(self, at: Progress, accumulate: int) -> bool:
        """Return whether it is due for a point that the run has passed, which counters alone do not say after a resume."""
        return False

    def is_past(self, at: Progress) -> bool:
        """Return whether it was due for a unit that is still under way: for the fetch that found the loader empty."""
        return False

    def make_past(self, at: Progress) -> None:  # noqa: B027
        """Have it not be due again for the unit that is under way."""

    def parts(self) -> Iterator[Timer]:
        """Yield the timers without parts in this one."""
        yield self

    @property
    def counts_times(self) -> bool:
        """Whether it counts how often the moment fired: a checkpoint holds `times`."""
        return False

    @property
    def times(self) -> int:
        """How often the moment fired in the run."""
        return 0

    def add_times(self, times: int) -> None:  # noqa: B027
        """Count firings of the moment."""


class Pulse(Timer):
    """A timer that is due at points of the run: at the first firing of the moment after each of them."""

    __slots__ = ()

    def next_pulse(self, at: Progress, accumulate: int) -> float:
        return self.next_step(at, accumulate)


class Never(Timer):
    """Never due: the pulses of the other one of two listeners."""

    __slots__ = ()

    seldom = True

    def due(self, run: Run) -> bool:
        return False

    def next_step(self, at: Progress, accumulate: int) -> float:
        return math.inf


# -- whole numbers of a counter ---------------------------------------------------------------------


class CountTimer(Pulse):
    """Due at each multiple of `count`, or at the first one. With `ahead`, the unit under way counts as complete."""

    __slots__ = ("_ahead", "_count", "_next", "_once", "_read", "_unit", "seldom")

    def __init__(self, count: int, unit: Counted, *, ahead: bool = False, once: bool = False) -> None:
        self._count, self._unit, self._ahead, self._once = count, unit, int(ahead), once
        self._read = Progress.reader(unit)
        self._next: float = -1  # the value at which it is due; below 0 until the counters of the run are known
        self.seldom: bool = (count >= SELDOM or once) and unit in ("step", "batch")

    def due(self, run: Run) -> bool:
        progress = run.progress
        value = self._read(progress)
        if value < self._next or (self._next < 0 and value < self._from(progress)):
            return False
        self._next = math.inf if self._once else ((value + self._ahead) // self._count + 1) * self._count - self._ahead
        return True

    def next_step(self, at: Progress, accumulate: int) -> float:
        following = self._from(at)
        if following == math.inf or self._unit == "step":
            return following
        return after_batches(following - at.batch, at, accumulate) if self._unit == "batch" else 0

    def would_be_due(self, at: Progress) -> bool:
        return self._read(at) >= self._from(at)

    def waits(self, at: Progress, accumulate: int) -> bool:
        return not self._ahead and self.would_be_due(at)

    def is_past(self, at: Progress) -> bool:
        under_way = at.batch + self._ahead
        return self._unit == "batch" and self._next > at.batch and under_way > at.batch and self._reaches(under_way)

    def make_past(self, at: Progress) -> None:
        self._next = math.inf if self._once else at.batch + self._count

    def _reaches(self, value: int) -> bool:
        """Return whether it is due when its counter reaches this value."""
        return value == self._count if self._once else value % self._count == 0

    def make_due(self, at: Progress) -> None:
        self._next = 0

    def _from(self, at: Progress) -> float:
        if self._next < 0:
            passed = counter(at.origin, self._unit) // self._count  # where the fit began, nothing is under way
            self._next = math.inf if self._once and passed else (passed + 1) * self._count - self._ahead
        return self._next


def after_batches(batches: float, at: Progress, accumulate: int) -> float:
    """Return how many steps are complete, at the earliest, when so many more batches are; also inside of a step."""
    return at.step - 1 + math.ceil(batches / accumulate)


def counter(at: Progress | Counters, unit: Counted) -> int:
    """Return the value of a counter."""
    return getattr(at, {"sample": "samples", "token": "tokens"}.get(unit, unit))  # type: ignore[no-any-return]


class TimesTimer(Pulse):
    """Due at each multiple of `count` of the firings of a moment, or at the first one. A checkpoint holds their number."""

    __slots__ = ("_count", "_once", "_times")

    def __init__(self, count: int, *, once: bool = False) -> None:
        self._count, self._once = count, once
        self._times = 0

    @property
    def counts_times(self) -> bool:
        return True

    def due(self, run: Run) -> bool:
        self._times += 1
        return self._times == self._count if self._once else self._times % self._count == 0

    @property
    def times(self) -> int:
        return self._times

    def add_times(self, times: int) -> None:
        self._times += times


# -- parts of an epoch, and of the run --------------------------------------------------------------


class PartTimer(Pulse):
    """Due at each multiple of a part of something, or at the first one. It may change in a run of how much it is a part."""

    __slots__ = ("_base", "_behind", "_once", "_part", "_parts")

    seldom = True

    def __init__(self, interval: Fraction | int, *, once: bool = False) -> None:
        self._part, self._parts = interval.numerator, interval.denominator
        self._once = once
        self._base: Counters | None = None  # where intervals count from
        self._behind = 0

    @abstractmethod
    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        """Return how many intervals are complete."""

    @abstractmethod
    def step_of(self, interval: int, at: Progress, accumulate: int) -> float:
        """Return how many steps are complete, at the earliest, when so many intervals are."""

    def due(self, run: Run) -> bool:
        progress = run.progress
        if progress.fractions_from is not self._base:
            self._begin(progress, self._accumulate(run))
        behind, self._behind = self._behind, self._done(progress, progress)
        return self._behind > behind

    def next_step(self, at: Progress, accumulate: int) -> float:
        if at.fractions_from is not self._base:
            self._begin(at, accumulate)
        return math.inf if self._once and self._behind > 0 else self.step_of(self._behind + 1, at, accumulate)

    def would_be_due(self, at: Progress) -> bool:
        return self._behind < 0 or (self._base is at.fractions_from and self._done(at, at) > self._behind)

    def waits(self, at: Progress, accumulate: int) -> bool:
        if at.fractions_from is not self._base:
            self._begin(at, accumulate)
        return self._done(at, at) > self._behind

    def make_due(self, at: Progress) -> None:
        self._behind, self._base = -1, None

    def _accumulate(self, run: Run) -> int:
        """Return the batches of a step, if the parts depend on them."""
        return 1

    def _begin(self, at: Progress, accumulate: int) -> None:
        owed, self._base = self._behind < 0, at.fractions_from
        self._behind = self._done(self._base, at) - owed

    def _done(self, at: Progress | Counters, limits: Progress) -> int:
        passed = self.passed(at, limits)
        return min(1, passed) if self._once else passed


class EpochTimer(PartTimer):
    """Due at each multiple of a fraction of an epoch. Fractions count by the batches of each epoch."""

    __slots__ = ()

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        batches = limits.batches_per_epoch or 1  # `Schedule.check` has refused a loader without length
        return (at.epoch * batches + at.batch_in_epoch) * self._parts // (self._part * batches)

    def step_of(self, interval: int, at: Progress, accumulate: int) -> float:
        batches = at.batches_per_epoch or 1
        due = -(-interval * self._part * batches // self._parts) - at.epoch * batches
        return after_batches(due - at.batch_in_epoch, at, accumulate)


class PercentTimer(PartTimer):
    """Due at each multiple of a percentage of the run: of its steps or, if the run ends by tokens alone, of its tokens."""

    __slots__ = ("_total", "_unit")

    def __init__(self, interval: Fraction | int, *, once: bool = False) -> None:
        super().__init__(interval, once=once)
        self._parts *= 100  # the interval is in percent
        self._unit: Counted = "step"
        self._total = 1

    def _accumulate(self, run: Run) -> int:
        return run.info.accumulate

    def _begin(self, at: Progress, accumulate: int) -> None:
        first, behind = self._base is None, self._behind
        self._unit, self._total = measure_of(at, accumulate)
        super()._begin(at, accumulate)
        if not first:  # the run turned out shorter: points that it has passed by this are due
            self._behind = min(behind, self._behind)

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        return counter(at, self._unit) * self._parts // (self._part * self._total)

    def step_of(self, interval: int, at: Progress, accumulate: int) -> float:
        return -(-interval * self._part * self._total // self._parts) if self._unit == "step" else 0


def measure_of(at: Progress, accumulate: int) -> tuple[Counted, int]:
    """Return the unit in which percentages of a run are measured, and how many of them the run has."""
    steps = at.total("step", accumulate)
    return ("step", max(1, steps)) if steps is not None else ("token", at.total("token", accumulate) or 1)


# -- the clock --------------------------------------------------------------------------------------


class ClockTimer(Pulse):
    """Due every so many seconds, after a step that was completed: time goes on in an error, too."""

    __slots__ = ("_interval_s", "_last", "_next_s", "_once", "_pace", "_seen", "seldom")

    def __init__(self, interval_s: float, *, once: bool = False) -> None:
        self._interval_s = self._next_s = interval_s
        self._once = once
        self._last: int | None = None  # the step at which it was due last
        self._seen: tuple[int, float] | None = None
        self._pace = 0.0  # steps in a second
        self.seldom: bool = interval_s >= _SELDOM_S

    def due(self, run: Run) -> bool:
        progress = run.progress
        elapsed_s = progress.elapsed_s
        if elapsed_s < self._next_s or progress.step == (progress.origin.step if self._last is None else self._last):
            return False
        self._last = progress.step
        self._next_s = math.inf if self._once else (elapsed_s // self._interval_s + 1) * self._interval_s
        return True

    def next_step(self, at: Progress, accumulate: int) -> float:
        if not self.seldom or self._next_s == math.inf:
            return self._next_s if self._next_s == math.inf else 0
        step, elapsed_s = at.step, at.elapsed_s
        if self._seen is None or elapsed_s > self._seen[1]:
            before, self._seen = self._seen, (step, elapsed_s)
            self._pace = 0.0 if before is None else (step - before[0]) / (elapsed_s - before[1])
        steps = int(self._pace * min(1.0, self._next_s - elapsed_s))
        return step + min(steps, (step - at.origin.step) // 2)  # the pace of the first steps says little

    def would_be_due(self, at: Progress) -> bool:
        return at.elapsed_s >= self._next_s

    def make_due(self, at: Progress) -> None:
        self._next_s = 0.0
