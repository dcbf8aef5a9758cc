"""What schedules count: the table of counters, and a reading of them at one firing of a moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cadenza.status.formats import plural

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.status.progress import Counters, Progress

Own = Literal["epoch", "step", "batch", "time"]


# -- the table --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counter:
    """A row of `COUNTERS`: a unit of schedules, such as the steps in ``"500 steps"``."""

    read: Callable[[Progress | Counters], float]
    """Reads the counter; one that is not kept, of a `Progress` only. It never falls in a run."""
    sizes: Mapping[str, int]
    """The names of its units in texts, with how many it counts for one of each: ``{"s": 1, "min": 60}``."""
    whole: bool = True
    """Whether only whole numbers of it make sense."""
    exchanged: bool = False
    """Whether ranks add up what each of them has counted: in steps without an exchange it stands still."""
    kept: bool = True
    """Whether it goes on after a resume, so that a checkpoint holds it. Otherwise each fit counts from 0."""


def _named(name: str) -> dict[str, int]:
    return {name: 1, plural(name): 1}


_SECONDS = {"s": 1, **_named("second"), "min": 60, "minute": 60, "minutes": 60, "h": 3600, "hour": 3600, "hours": 3600}
_SECONDS |= {"d": 86400, "day": 86400, "days": 86400}

COUNTERS: dict[str, Counter] = {
    "epoch": Counter(attrgetter("epoch"), _named("epoch"), whole=False),
    "step": Counter(attrgetter("step"), _named("step")),
    "batch": Counter(attrgetter("batch"), _named("batch")),
    "sample": Counter(attrgetter("samples"), _named("sample"), exchanged=True),
    "token": Counter(attrgetter("tokens"), _named("token"), exchanged=True),
    "s": Counter(attrgetter("elapsed_s"), _SECONDS, whole=False, kept=False),
}
"""The counters of a run, by the name of their unit. A further row is a further unit of ``every=``: it is parsed, agreed on by
ranks, and kept in checkpoints, as the row says."""


def exchanged(units: Iterable[str]) -> list[str]:
    """Return those of some units that ranks add up: how many of them a step has is not known before it."""
    return [unit for unit in units if unit in COUNTERS and COUNTERS[unit].exchanged]


def kept(unit: str) -> bool:
    """Return whether a point in a unit is the same after a resume."""
    return unit not in COUNTERS or COUNTERS[unit].kept


# -- how a moment counts ----------------------------------------------------------------------------

NONE: frozenset[str] = frozenset()
BATCH = frozenset(("epoch", "step", "batch", "sample", "token"))
"""Under way at a moment before the end of a batch."""
STEP = frozenset(("epoch", "step"))
"""Under way at a moment after a batch and before the end of its step."""


@dataclass(frozen=True, slots=True)
class Counting:
    """How the schedules of a moment count."""

    unit: Own = "step"
    """What a bare number counts; ``"time"``: how often the moment fired in the run."""

    under_way: frozenset[str] = NONE
    """The units that are not complete when the moment fires: the 3rd step starts when 2 are complete."""

    begun: bool = False
    """Whether the moment also fires for a unit that is never complete: an epoch that ``max_steps`` ends."""

    main_only: bool = False
    """Whether the moment fires on the main process only."""

    ahead: str = field(init=False, compare=False)
    """Its unit, if that is under way when it fires."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ahead", self.unit if self.unit in self.under_way else "")


STEP_END = Counting("step")
_UNCOUNTED = Counting("time")
_OF_MOMENTS: dict[Callable[..., None], Counting] = {}


def set_counting(moment: Callable[..., None], counting: Counting) -> None:
    """Set how the schedules of a moment count."""
    _OF_MOMENTS[moment] = counting


def counting_of(moment: Callable[..., None]) -> Counting:
    """Return how the schedules of a moment count. Without a counter, they count how often it fired in the run.

    >>> from cadenza import Callback
    >>> counting_of(Callback.on_batch_end).unit, counting_of(Callback.on_eval_end).unit
    ('batch', 'time')
    """
    return _OF_MOMENTS.get(moment, _UNCOUNTED)


# -- a reading --------------------------------------------------------------------------------------


Bound = tuple[str, float]
"""The name of a counter, and a value of it. Asking makes several: a class would take ten times as long."""

STEPS = ("step", 0)
NEVER: Bound = ("step", math.inf)
NOW: Bound = ("step", 0)


def no_answer(_: object) -> bool:
    """Return False for a function of the user that is not to be called."""
    return False


def an_answer(_: object) -> bool:
    """Return True for it."""
    return True


class Reading(NamedTuple):
    """The counters of a run at one firing of a moment. A schedule is due or not by this and the reading before.

    The two ways to read a position differ in the unit that is under way. A point is reached by the complete units, and by that
    which the moment itself counts: the 3rd step start is that of step 3. A window holds all that is under way: a moment
    inside of step 11 is not in the first ten.
    """

    counts: dict[str, float]
    """The counters that the schedule needs, by name; and ``"time"``: how often the moment fired in the run."""
    on: Counting
    """How the moment counts."""
    limits: Progress
    """The limits of the run."""
    in_epoch: int = 0
    """Complete batches of the epoch under way."""
    batches: int = 0
    """The batches of that epoch; 0 if they are not known."""
    of: tuple[str, int] = STEPS
    """The counter of which percentages are parts, and its total."""
    begun: bool = True
    """Whether the unit of the moment is under way: not at the reading where a fit begins."""
    ask: Callable[[Any], bool] = no_answer
    """Calls the function of a `When`."""

    def complete(self, unit: str) -> Any:
        """Return how much of a unit is complete; that of the moment counts when it is under way."""
        count = self.counts.get(unit)
        if count is not None:
            return count + (unit == self.on.ahead and self.begun)
        return self.percent(self.counts[self.of[0]]) if unit == "%" else self.epochs()

    def inside(self, unit: str) -> Any:
        """Return the position of the moment for a window: each unit that is under way counts."""
        under_way = self.on.under_way
        if unit == "epoch":
            return self.counts["epoch"] + ("epoch" in under_way or self.in_epoch > 0)
        if unit == "fraction":
            return self.epochs("batch" in under_way)
        if unit == "%":
            return self.percent(self.counts[self.of[0]] + (self.of[0] in under_way))
        return self.counts[unit] + (unit in under_way)

    def epochs(self, ahead: int = 0) -> Fraction:
        """Return the complete epochs, with the part of that under way, which counts by its batches."""
        from fractions import Fraction  # here, as it takes 2 ms to import

        return int(self.counts["epoch"]) + Fraction(self.in_epoch + ahead, self.batches or 1)

    def percent(self, count: float) -> Fraction:
        """Return which part of the run so many units are, in percent."""
        from fractions import Fraction

        return Fraction(100 * int(count), self.of[1] or 1)

    def bound(self, unit: str, point: Any, *, window: bool = False) -> Bound:
        """Return a counter, and the value below which this moment is not at a point of a unit."""
        under_way = self.on.under_way
        if unit == "fraction":  # at most to the end of the epoch: the next one may have another number of batches
            left = math.ceil((point - self.epochs()) * (self.batches or 1)) - (window and "batch" in under_way)
            return "batch", self.counts["batch"] + min(left, max(1, self.batches - self.in_epoch))
        if unit == "%":
            unit, point = self.of[0], math.ceil(point * self.of[1] / 100)
            return unit, point - (window and unit in under_way)
        if unit == "time":
            return NOW
        return unit, point - (unit in under_way and unit != "epoch" if window else unit == self.on.ahead)


def steps_until(bound: Bound, at: Progress) -> float:
    """Return how many steps are complete, at the earliest, when a counter is at a value; those of now if it is not known."""
    counter, value = bound
    if counter == "step" or value == math.inf:
        return value
    if counter == "s" and at.elapsed_s:  # at the pace of this fit, at most a second ahead
        done = at.step - at.origin.step
        return at.step + min(int(done / at.elapsed_s * max(0.0, min(1.0, value - at.elapsed_s))), done // 2)
    if counter == "epoch" and at.batches_per_epoch is not None:
        counter, value = "batch", at.batch + (value - at.epoch) * at.batches_per_epoch - at.batch_in_epoch
    return at.step - 1 + math.ceil((value - at.batch) / at.most_batches) if counter == "batch" else at.step


def measure_of(at: Progress) -> tuple[str, int]:
    """Return the counter of which percentages of a run are parts, and its total: of steps or, without, of tokens."""
    steps = at.total("step")
    return ("step", max(1, steps)) if steps is not None else ("token", at.total("token") or 1)


def counters_for(units: Collection[str]) -> list[str]:
    """Return the counters that a reading needs for lengths of these units."""
    needed = {"epoch", "step", "batch", *units, *(("token",) if "%" in units else ())}
    return [name for name in COUNTERS if name in needed]


def reading_at(counters: Counters, limits: Progress, on: Counting, units: Collection[str], *, begun: bool = True) -> Reading:
    """Return a reading with these counters, and with a clock at 0; without `begun`, one between two steps."""
    counts = {name: COUNTERS[name].read(counters) if COUNTERS[name].kept else 0 for name in counters_for(units)}
    counts |= {"time": 0} if "time" in units else {}
    of = measure_of(limits) if "%" in units else STEPS
    return Reading(counts, on, limits, counters.batch_in_epoch, limits.batches_per_epoch or 0, of, begun)
