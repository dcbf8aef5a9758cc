"""Schedules: when a listener is called. Whoever changes how ``every=`` works reads this folder, and this page first.

A `Schedule` is a value, such as ``every=3``, ``at=5`` or ``"10 min"`` (`cadenza.hooks.cadence` reads the texts). It has no
state, so callbacks may share it. `Schedule.timer` makes its state in one run: a `Timer`, which answers two questions.

- `Timer.due(run)`: is the listener called now? Asked each time the moment fires.
- `Timer.next_step(counters)`: from how many complete steps on must `due` be asked again?

The rules, which every schedule follows and `cadenza.hooks.dispatch` relies on:

1. The answers depend on the counters of the run and on its clock, never on how often a timer was asked. So
   checkpoints hold no timers, and a resumed run calls a listener at the same steps as the uninterrupted run.
2. A listener is due when its counter has reached the next multiple of the interval, and once for each. Counters may jump
   (samples do); a step that failed and an epoch that was cut short count for nothing.
3. `next_step` may be too early, and never too late: until so many steps, or the epoch under way, are complete, `due` returns
   False at every moment. 0 means that it must be asked each time.
4. Only `Hooks.look` acts on `next_step`: a listener that is not due for some steps is not in the list that its moment calls.
5. On several ranks, counters and clock are those of all ranks. So each rank gets the same answers without asking the others,
   and knows in which steps a listener of any rank can ask for something (`Hooks.next_call`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cadenza.status.counting import plural
from cadenza.status.progress import Counters, Progress
from cadenza.status.shown import brief

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.run import Run
    from cadenza.status.progress import Unit

Counter = Literal["epoch", "step", "batch", "sample"]

SELDOM = 10  # steps: a listener that is due this seldom is not asked in between
_SELDOM_S = 10.0  # seconds: the same for the clock, which is then looked at about once a second


class Schedule(ABC):
    """When a listener is called. Give it to a `Listener`; `Cadence.parse` reads one from what ``every=`` takes."""

    __slots__ = ()

    @abstractmethod
    def timer(self) -> Timer:
        """Return the state of this schedule in one run that begins."""

    def check(self, limits: Progress) -> None:  # noqa: B027  # most schedules work with any loader
        """Raise `CadenceError` if a run with these limits cannot tell when the listener is due."""

    def never(self, limits: Progress, accumulate: int) -> str | None:
        """Return why the listener is never due in a run with these limits; None if it may be due."""
        return None


class Timer(ABC):
    """A schedule in one run. The page above says what its answers mean."""

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

    def would_be_due(self, at: Progress) -> bool:
        """Return what `due` would answer, and change nothing."""
        return False

    def make_due(self, at: Progress) -> None:  # noqa: B027  # a function of the user is asked in any case
        """Have `due` return True the next time, which is now: for a moment that continues after a resume."""


# -- whole numbers of a counter ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Every(Schedule):
    """``every=3`` on a moment that counts steps: steps 3, 6, 9, ..."""

    count: int
    unit: Unit
    under_way: bool = False  # step 3 starts when 2 are complete
    begun: bool = False  # the moment also comes for a unit that is never complete

    def timer(self) -> Timer:
        return CountTimer(self.count, self.unit, ahead=int(self.under_way))

    def never(self, limits: Progress, accumulate: int) -> str | None:
        return too_late(self.count, self.unit, limits, accumulate, begun=self.begun)

    def __str__(self) -> str:
        return f"every {amount(self.count, self.unit)}"


class At(Every):
    """``at=5`` on a moment that counts steps: once, at the fifth."""

    __slots__ = ()  # what it holds is what `Every` holds

    def timer(self) -> Timer:
        return CountTimer(self.count, self.unit, ahead=int(self.under_way), once=True)

    def __str__(self) -> str:
        return f"at {self.unit} {self.count}"


class CountTimer(Timer):
    """Due at each multiple of `count`, or at the first one. With `ahead`, the unit under way counts as complete."""

    __slots__ = ("_ahead", "_count", "_next", "_once", "_read", "_unit", "seldom")

    def __init__(self, count: int, unit: Counter, *, ahead: int = 0, once: bool = False) -> None:
        self._count, self._unit, self._ahead, self._once = count, unit, ahead, once
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


def counter(at: Progress | Counters, unit: Counter) -> int:
    """Return the value of a counter."""
    return getattr(at, {"sample": "samples"}.get(unit, unit))  # type: ignore[no-any-return]


# -- parts of an epoch ------------------------------------------------------------------------------


class EpochTimer(Timer):
    """Due at each multiple of a fraction of an epoch, or at the first one. Fractions count by the batches of each epoch."""

    __slots__ = ("_base", "_behind", "_once", "_part", "_parts")

    seldom = True

    def __init__(self, interval: Fraction | int, *, once: bool = False) -> None:
        self._part, self._parts = interval.numerator, interval.denominator
        self._once = once
        self._base: Counters | None = None  # where intervals count from: the number of batches in an epoch may change
        self._behind = 0

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        """Return how many intervals are complete."""
        batches = limits.batches_per_epoch or 1  # `Schedule.check` has refused a loader without length
        passed = (at.epoch * batches + at.batch_in_epoch) * self._parts // (self._part * batches)
        return min(1, passed) if self._once else passed

    def due(self, run: Run) -> bool:
        progress = run.progress
        behind, self._behind = self._from(progress), self.passed(progress, progress)
        return self._behind > behind

    def next_step(self, at: Progress, accumulate: int) -> float:
        behind = self._from(at)
        if self._once and behind:
            return math.inf
        batches = at.batches_per_epoch or 1
        due = -(-(behind + 1) * self._part * batches // self._parts) - at.epoch * batches
        return after_batches(due - at.batch_in_epoch, at, accumulate)

    def would_be_due(self, at: Progress) -> bool:
        return self.passed(at, at) > self._from(at)

    def make_due(self, at: Progress) -> None:
        self._base, self._behind = at.fractions_from, self.passed(at, at) - 1

    def _from(self, at: Progress) -> int:
        if at.fractions_from is not self._base:
            self._base = at.fractions_from
            self._behind = self.passed(self._base, at)
        return self._behind


# -- the clock --------------------------------------------------------------------------------------


class ClockTimer(Timer):
    """Due every so many seconds, after a step that was completed: time goes on in an error, too."""

    __slots__ = ("_interval_s", "_last", "_next_s", "_pace", "_seen", "seldom")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = self._next_s = interval_s
        self._last: int | None = None  # the step at which it was due last
        self._seen: tuple[int, float] | None = None
        self._pace = 0.0  # steps in a second
        self.seldom: bool = interval_s >= _SELDOM_S

    def due(self, run: Run) -> bool:
        progress = run.progress
        elapsed_s = progress.elapsed_s
        if elapsed_s < self._next_s or progress.step == (progress.origin.step if self._last is None else self._last):
            return False
        self._last, self._next_s = progress.step, (elapsed_s // self._interval_s + 1) * self._interval_s
        return True

    def next_step(self, at: Progress, accumulate: int) -> float:
        if not self.seldom:
            return 0
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


# -- functions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class When(Schedule):
    """``when=`` calls a function of the run each time; as ``every=`` only when a step was completed, and then on all ranks.

    A listener often needs all ranks, and the function may read what differs among them, such as ``run.loss``. So the listener
    is due on all ranks if it is due on one.
    """

    function: Callable[[Run], bool]
    each_step: bool = False

    def timer(self) -> Timer:
        return StepTimer(self.function) if self.each_step else FunctionTimer(self.function)

    def __repr__(self) -> str:
        return f"When({brief(self.function)})"

    def __str__(self) -> str:
        return f"when {brief(self.function)}"


class FunctionTimer(Timer):
    """Due when a function of the run says so."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Run], bool]) -> None:
        self._function = function

    def due(self, run: Run) -> bool:
        return self._function(run)


class StepTimer(FunctionTimer):
    """The same after each completed step, on all ranks if on one."""

    __slots__ = ("_last",)

    def __init__(self, function: Callable[[Run], bool]) -> None:
        super().__init__(function)
        self._last: int | None = None

    def due(self, run: Run) -> bool:
        step = run.progress.step
        if step == (run.progress.origin.step if self._last is None else self._last):
            return False
        self._last = step
        return run.driver.any_rank(self._function(run))


@dataclass(frozen=True, slots=True)
class Until(Schedule):
    """Each time while fewer steps than `end` returns are complete; then never again."""

    end: Callable[[], float]

    def timer(self) -> Timer:
        return UntilTimer(self.end)

    def __repr__(self) -> str:
        return f"Until({brief(self.end)})"

    def __str__(self) -> str:
        return "in its first steps"


class UntilTimer(Timer):
    """Due until so many steps are complete."""

    __slots__ = ("_end",)

    seldom = True

    def __init__(self, end: Callable[[], float]) -> None:
        self._end = end

    def due(self, run: Run) -> bool:
        return run.progress.step < self._end()

    def next_step(self, at: Progress, accumulate: int) -> float:
        return 0 if at.step < self._end() else math.inf


# -- texts ------------------------------------------------------------------------------------------


def brief_setting(value: object) -> str:
    """Return the text of an argument in the ``repr`` of its owner: a schedule is shown as ``every=`` takes it."""
    if not isinstance(value, Schedule):
        return brief(value)
    text = str(value).removeprefix("every ")
    return repr(f"1 {text}" if str(value) != text and text.isalpha() else text)


def amount(count: Fraction | int, unit: str) -> str:
    """Return a number and its unit as text: ``"3 batches"``, ``"step"`` for one."""
    if count == 1:
        return unit
    return f"{int(count) if count == int(count) else f'{float(count):g}'} {unit if count <= 1 else plural(unit)}"


def too_late(count: Fraction | int, unit: Unit, limits: Progress, accumulate: int, *, begun: bool = False) -> str | None:
    """Return why a run with these limits ends before so many of a unit are complete, or begun; None if it may not."""
    total, known = limits.at_most(unit, accumulate), limits.total(unit, accumulate) is not None
    most = limits.begun(unit, accumulate) if begun and known else total
    if total is None or most is None or count <= most:
        return None
    if total == 0:
        return f"the run ends before the first {unit} is over"
    return f"the run ends after {'' if known else 'at most '}{amount(total, unit) if total != 1 else '1 ' + unit}"
