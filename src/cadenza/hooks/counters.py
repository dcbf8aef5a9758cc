"""What schedules count: the table of counters, lengths of a run in them, and a reading of them at one firing of a moment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypeVar

from cadenza.errors import ScheduleError, nearest
from cadenza.hooks.numbers import whole_number
from cadenza.status.formats import plural

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.status.progress import Counters, Progress

Moment = TypeVar("Moment", bound=Callable[..., None])


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

    unit: Literal["epoch", "step", "batch", "time"] = "step"
    """What a bare number counts; ``"time"``: how often the moment fired in the run."""

    under_way: frozenset[str] = NONE
    """The units that are not complete when the moment fires: the 3rd step starts when 2 are complete."""

    begun: bool = False
    """Whether the moment also fires for a unit that is never complete: an epoch that ``max_steps`` ends."""

    main_only: bool = False
    """Whether the moment fires on the main process only."""


STEP_END = Counting("step")
_UNCOUNTED = Counting("time")
_OF_MOMENTS: dict[Callable[..., None], Counting] = {}


def counts(
    unit: Literal["epoch", "step", "batch"], under_way: frozenset[str] = NONE, **others: bool
) -> Callable[[Moment], Moment]:
    """Mark how the schedules of a moment count: its unit, and which units have begun when it fires."""

    def mark(moment: Moment) -> Moment:
        _OF_MOMENTS[moment] = Counting(unit, under_way, **others)
        return moment

    return mark


def counting_of(moment: Callable[..., None]) -> Counting:
    """Return how the schedules of a moment count. Without a counter, they count how often it fired in the run.

    >>> from cadenza import Callback
    >>> counting_of(Callback.on_batch_end).unit, counting_of(Callback.on_eval_end).unit
    ('batch', 'time')
    """
    return _OF_MOMENTS.get(moment, _UNCOUNTED)


# -- lengths of a run, such as "500 steps": all schedules are made of them --------------------------


Unit = Literal["epoch", "step", "batch", "sample", "token", "s", "%", "time", ""]
"""The units of a length. ``"time"``: how often a moment fired. The empty one is replaced by the moment's own unit."""

LENGTHS = (
    '500 (steps), "500 steps", "1 epoch", "0.25 epoch", "2000 batches", "50000 samples", "1e9 tokens", "30 s", "10 min", '
    '"2 h", "10%"'
)
"""The forms of a length, for messages."""


@dataclass(frozen=True, slots=True)
class Length:
    """A number of a unit.

    >>> str(Length.parse("0.25 epoch")), str(Length.parse("1_000 steps")), str(Length.parse("1e6 tokens"))
    ('0.25 epoch', '1000 steps', '1000000 tokens')
    """

    count: Fraction | int
    """The number: of seconds for a time, of percents of the run for ``"10%"``."""
    unit: Unit
    measure: str = field(init=False, compare=False, repr=False)
    """The unit of its readings: parts of an epoch count by batches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", self.unit if self.unit != "epoch" or self.whole else "fraction")

    @staticmethod
    def parse(given: object, forms: str = LENGTHS, *, zero: bool = False) -> Length:
        """Read a length. A whole number has no unit.

        Args:
            given: A number or a text.
            forms: The allowed forms, for the message.
            zero: Whether 0 is allowed.

        Raises:
            ScheduleError: `given` has none of the forms.
        """
        if isinstance(given, Length):
            return given
        if isinstance(given, str):
            return _read(given, forms, zero)
        if (number := whole_number(given)) is not None and (number > 0 or (zero and number == 0)):
            return Length(number, "")
        wrong = ": a number must be whole and at least 1" if isinstance(given, float | SupportsIndex) else ""
        wrong += ": several are joined by |, as in At(5) | At(10)" if isinstance(given, list | tuple | set | range) else ""
        raise ScheduleError(f"{given!r} is no schedule{wrong}. Use one of: {forms}")

    @property
    def whole(self) -> bool:
        """Whether it is a whole number of its unit."""
        return self.count.denominator == 1

    @property
    def whole_epochs(self) -> bool:
        """Whether it counts whole epochs."""
        return self.unit == "epoch" and self.whole

    @property
    def point(self) -> tuple[str, Fraction | int]:
        """Its measure and its number."""
        return self.measure, self.count

    def of(self, unit: Unit) -> Length:
        """Return the same with this unit if it has none."""
        return self if self.unit else replace(self, unit=unit)

    @property
    def text(self) -> str | int:
        """What `parse` reads as the same."""
        if not self.unit:
            return int(self.count)
        said = str(self)
        return f"1 {said}" if said.isalpha() else said

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{float(self.count):g}%"
        if self.unit != "s":
            return amount(self.count, self.unit or "time")
        size, name = next(((size, name) for name, size in (("h", 3600), ("min", 60)) if self.count >= size), (1, "s"))
        return f"{float(self.count / size):g} {name}"


def amount(count: Fraction | int, unit: str) -> str:
    """Return a number and its unit as text: ``"3 batches"``, ``"step"`` for one."""
    if count == 1:
        return unit
    return f"{int(count) if count == int(count) else f'{float(count):g}'} {unit if 0 < count <= 1 else plural(unit)}"


def check_length(schedule: object, length: Length, limits: Progress) -> None:
    """Raise `ScheduleError` if a run with these limits cannot tell where the point is."""
    if length.unit == "epoch" and not length.whole and not limits.has_epochs:
        raise ScheduleError(f"'{schedule}': {_NO_EPOCHS}.")
    if length.unit == "epoch" and not length.whole and limits.batches_per_epoch is None:
        raise ScheduleError(
            f"'{schedule}' needs a loader that knows its length (has __len__); this one does not. "
            'Use a schedule in "steps", "batches", "samples" or "min" instead.'
        )
    if length.unit == "%" and limits.total("step") is None and limits.total("token") is None:
        raise ScheduleError(
            f"'{schedule}' needs a run of known length: max_steps= alone, or max_epochs= and a loader that knows its length "
            '(has __len__); or max_tokens= alone. Or use a schedule in "steps", "batches", "samples" or "min" instead.'
        )


def too_late(length: Length, limits: Progress, accumulate: int, *, begun: bool = False) -> str | None:
    """Return why a run with these limits ends before this length is complete, or begun; None if it may not."""
    count, unit = length.count, length.unit
    if unit == "epoch" and count and not limits.has_epochs:
        return _NO_EPOCHS
    if unit == "epoch" and not length.whole:
        count, unit = count * (limits.batches_per_epoch or 0), "batch"
    if unit not in ("epoch", "step", "batch") or not count:
        return None
    total, known = limits.at_most(unit, accumulate), limits.total(unit, accumulate) is not None
    most = limits.begun(unit, accumulate) if begun and known else total
    if total is None or most is None or count <= most:
        return None
    if total == 0:
        return f"the run ends before the first {unit} is over"
    return f"the run ends after {'' if known else 'at most '}{amount(total, unit) if total != 1 else '1 ' + unit}"


_NO_EPOCHS = 'a loop of cadenza.attach has no epochs. Use a schedule in "steps" or "min" instead'


def _read(text: str, forms: str, zero: bool) -> Length:
    from fractions import Fraction  # here, as it takes 2 ms to import

    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]+|%)\s*", text)
    if match is None:
        hint = f" Did you mean {text.strip()}, without quotes?" if text.strip().isdigit() else ""
        hint = f" Did you mean directory={text!r}?" if "/" in text else hint
        raise ScheduleError(f"{text!r} is no schedule: expected a number and a unit.{hint} Use one of: {forms}")
    number, unit_name = match.groups()
    units: dict[str, tuple[Any, int]] = {
        name: (unit, size) for unit, counter in COUNTERS.items() for name, size in counter.sizes.items()
    }
    units["%"] = "%", 1
    if unit_name not in units:
        raise ScheduleError(
            f"{text!r} is no schedule: unknown unit {unit_name!r}.{nearest(unit_name, units)} Use one of: {forms}"
        )
    unit, size = units[unit_name]
    count = Fraction(number.replace("_", "")) * size
    if count < 0 or (count == 0 and not zero):
        raise ScheduleError(f"{text!r} is no schedule: the number must be greater than 0.")
    if unit == "%" and count > 100:
        raise ScheduleError(f"{text!r} is no schedule: a run has 100%.")
    if count.denominator != 1 and unit in COUNTERS and COUNTERS[unit].whole:
        raise ScheduleError(f"{text!r} is no schedule: {unit_name} come in whole numbers. Use one of: {forms}")
    return Length(int(count) if count.denominator == 1 else count, unit)


# -- a reading --------------------------------------------------------------------------------------


Bound = tuple[str, float]
"""The name of a counter, and a value of it. Asking makes several: a class would take ten times as long."""

STEPS = ("step", 1)
NEVER: Bound = ("step", math.inf)
NOW: Bound = ("step", 0)


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
    in_epoch: int
    """Complete batches of the epoch under way."""
    batches: int
    """The batches of that epoch; 0 if they are not known."""
    of: tuple[str, int]
    """The counter of which percentages are parts, and its total: of steps or, if they are not known, of tokens."""
    begun: bool = True
    """Whether the unit of the moment is under way: not at the reading where a fit begins."""
    ask: Callable[[Any], bool] | None = None
    """Calls the function of a `When`."""

    def to_plain(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        counts = {name: count for name, count in self.counts.items() if kept(name)}
        return {"counts": counts, "in_epoch": self.in_epoch, "batches": self.batches, "begun": self.begun}

    def reached(self, unit: str) -> Any:
        """Return how much of a unit is complete; that of the moment counts when it is under way."""
        on = self.on
        if unit in self.counts:
            return self.counts[unit] + (unit == on.unit and unit in on.under_way and self.begun)
        return self._part(unit, under_way=False)

    def inside(self, unit: str) -> Any:
        """Return the position of the moment for a window: each unit that is under way counts."""
        under_way = self.on.under_way
        if unit in self.counts:
            return self.counts[unit] + (unit in under_way or (unit == "epoch" and self.in_epoch > 0))
        return self._part(unit, under_way=(self.of[0] if unit == "%" else "batch") in under_way)

    def _part(self, unit: str, *, under_way: bool) -> Fraction:
        """Return the part of the run in percent; or its epochs, of which the last one counts by its batches."""
        from fractions import Fraction  # here, as it takes 2 ms to import

        if unit == "%":
            return Fraction(100 * (int(self.counts[self.of[0]]) + under_way), self.of[1])
        return int(self.counts["epoch"]) + Fraction(self.in_epoch + under_way, self.batches or 1)

    def bound(self, unit: str, point: Any) -> Bound:
        """Return a counter, and a value of it below which this moment is not at a point of a unit, nor behind it."""
        if unit == "time":
            return NOW
        if unit == "%":
            unit, point = self.of[0], math.ceil(point * self.of[1] / 100)
        elif unit == "fraction":  # at most to the end of the epoch: the next one may have another number of batches
            missing = math.ceil((point - self.reached(unit)) * (self.batches or 1))
            unit, point = "batch", self.counts["batch"] + min(missing, max(1, self.batches - self.in_epoch))
        return unit, point - (unit in self.on.under_way and (unit != "epoch" or self.on.unit == "epoch"))


_POSITION = attrgetter("epoch", "step", "batch", "batch_in_epoch")


def reading(at: Progress | Counters, limits: Progress, on: Counting, units: Iterable[str], *, begun: bool = True) -> Reading:
    """Return a reading of the counters of a run, or of earlier ones, at second 0. `units` are those that schedules count by."""
    epoch, step, batch, in_epoch = _POSITION(at)
    counts, of = {"epoch": epoch, "step": step, "batch": batch}, STEPS
    for unit in units:
        if unit == "%":
            steps = limits.total("step")
            of = ("step", max(1, steps)) if steps is not None else ("token", limits.total("token") or 1)
            counts[of[0]] = COUNTERS[of[0]].read(at)
        elif unit == "time":
            counts[unit] = 0
        elif unit in COUNTERS:
            counts[unit] = COUNTERS[unit].read(at) if at is limits or COUNTERS[unit].kept else 0
    return Reading(counts, on, limits, in_epoch, limits.batches_per_epoch or 0, of, begun)


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
