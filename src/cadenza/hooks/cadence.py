"""How often: ``every=3`` on a moment, and cadences such as ``"500 steps"``.

All filters look at the run's counters, never at how often they were asked. So they need no place in a checkpoint, and a
resumed run fires where the whole one would have. A filter fires when its counter crosses a multiple of the interval:
counters may jump (samples do), and a step that failed or an epoch that was cut short counts for nothing.
"""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, Union

from cadenza.errors import CadenceError, nearest
from cadenza.hooks.gates import CrossingGate, TimedGate, UntilGate, nothing, once_a_step
from cadenza.status.progress import Counters, Progress, Unit

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.run import Run

FORMS = (
    '500 (steps), "500 steps", "1 epoch", "0.25 epoch", "2000 batches", "50000 samples", "30 s", "10 min", "2 h", '
    "or a function (run) -> bool"
)


Interval = Union[int, str, "Filter", Callable[["Run"], bool]]
"""What ``every=`` accepts: a number of steps, a text, or a function (run) -> bool that is called after each step."""

LONG = 10  # of steps: a filter that fires as seldom as this need not be asked each time


class Filter(ABC):
    """Decides whether a listener is called this time."""

    @abstractmethod
    def gate(self) -> Callable[[Run], bool]:
        """Return a fresh decision for one run, to be asked once at each firing of the moment."""

    def gated(self, act: Callable[..., object]) -> Callable[..., object]:
        """Return a function that calls `act` when it is due: the same decision, for what is asked in every step."""
        due = self.gate()

        def filtered(run: Run, *rest: Any) -> None:
            if due(run):
                act(run, *rest)

        return filtered

    def check(self, limits: Progress) -> None:  # noqa: B027  # most filters can always tell
        """Raise `CadenceError` if a run with these limits cannot tell when to fire."""

    def never(self, limits: Progress, accumulate: int) -> str | None:
        """Return why a run with these limits can never fire, or None if it may."""
        return None


class Crossing(Filter):
    """Fires when the number of whole intervals that lie behind has grown."""

    __slots__ = ()

    @abstractmethod
    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        """Return how many whole intervals lie behind these counters."""

    def base(self, at: Progress) -> Counters:
        """Return the counters from which on the intervals are counted, in this fit."""
        return at.origin

    @property
    def sleeps_long(self) -> bool:
        """Whether many steps lie between two firings."""
        return False

    def asleep_until(self, at: Progress) -> tuple[Callable[[Progress], int], float] | None:
        """Return a counter, and the value below which it need not be looked at again; None to look each time."""
        return None

    @property
    def stride(self) -> tuple[int, int]:
        """How many of its counter an interval is, and by how much the counter runs ahead; 0 if it is not that simple."""
        return 0, 0

    def gate(self) -> Callable[[Run], bool]:
        return self.gated(nothing)

    def gated(self, act: Callable[..., object]) -> Callable[..., bool]:
        return CrossingGate(self, act)


@dataclass(frozen=True, slots=True)
class Every(Crossing):
    """``every=3`` on a moment that counts steps: steps 3, 6, 9, ..."""

    count: int
    unit: Unit
    under_way: bool = False  # step 3 starts when 2 are complete
    begun: bool = False  # the moment also comes for a unit that is never complete

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        return self._position(at) // self.count

    @property
    def sleeps_long(self) -> bool:
        return self.unit != "epoch" and self.count >= LONG

    def _position(self, at: Progress | Counters) -> int:
        # The counters at which a fit began have nothing under way.
        return int(_counter(at, self.unit)) + (self.under_way and isinstance(at, Progress))

    def asleep_until(self, at: Progress) -> tuple[Callable[[Progress], int], float] | None:
        return at.reader(self.unit), (self.passed(at, at) + 1) * self.count - self.under_way

    @property
    def stride(self) -> tuple[int, int]:
        return self.count, int(self.under_way)

    def never(self, limits: Progress, accumulate: int) -> str | None:
        return _too_late(self.count, self.unit, limits, accumulate, begun=self.begun)

    def __str__(self) -> str:
        return f"every {_amount(self.count, self.unit)}"


class At(Every):
    """``at=5`` on a moment that counts steps: once, at the fifth."""

    __slots__ = ()  # what it holds is what `Every` holds

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        return int(self._position(at) >= self.count)

    @property
    def stride(self) -> tuple[int, int]:
        return 0, 0

    def asleep_until(self, at: Progress) -> tuple[Callable[[Progress], int], float] | None:
        return at.reader(self.unit), math.inf if self.passed(at, at) else self.count - self.under_way

    def __str__(self) -> str:
        return f"at {self.unit} {self.count}"


@dataclass(frozen=True, slots=True)
class When(Filter):
    """``when=`` asks a function of the run each time; as a cadence only when a step was completed, and then on all ranks.

    What is done at a cadence often takes all ranks, and the function may look at what differs among them, such as ``run.loss``:
    so it is due on all if it is on one.
    """

    function: Callable[[Run], bool]
    each_step: bool = False

    def gate(self) -> Callable[[Run], bool]:
        return once_a_step(lambda run: run.driver.any_rank(self.function(run))) if self.each_step else self.function

    def __str__(self) -> str:
        return f"when {getattr(self.function, '__name__', repr(self.function))}"


@dataclass(frozen=True, slots=True)
class Until(Filter):
    """Fires each time while fewer steps than `end` says are complete; then never again, and costs nothing more."""

    end: Callable[[], float]

    def gate(self) -> Callable[[Run], bool]:
        return lambda run: run.progress.step < self.end()

    def gated(self, act: Callable[..., object]) -> Callable[..., object]:
        return UntilGate(self.end, act)

    def __str__(self) -> str:
        return "in its first steps"


@dataclass(frozen=True, slots=True)
class Cadence(Crossing):
    """An interval, as every ``every=`` takes it: ``500`` (steps), ``"500 steps"``, ``"1 epoch"``, ``"10 min"``.

    Whole epochs are checked at the end of an epoch, all others at the end of a step.

    >>> str(Cadence.parse("0.25 epoch"))
    'every 0.25 epoch'
    >>> Cadence.parse("500 stps")
    Traceback (most recent call last):
        ...
    cadenza.errors.CadenceError: '500 stps' is no cadence: unknown unit 'stps'. Did you mean 'steps'? Use one of: \
500 (steps), "500 steps", "1 epoch", "0.25 epoch", "2000 batches", "50000 samples", "30 s", "10 min", "2 h", \
or a function (run) -> bool
    """

    interval: Fraction | int  # in units; a time in seconds
    unit: Literal["epoch", "step", "batch", "sample", "s"]

    @staticmethod
    def parse(every: Interval) -> Filter:
        """Read a cadence. A whole number counts steps.

        Raises:
            CadenceError: `every` has none of the allowed forms, which the message lists.
        """
        if isinstance(every, Filter):
            return every
        if isinstance(every, str):
            return _read(every)
        if (steps := whole_number(every)) is not None and steps > 0:
            return Cadence(steps, "step")
        if callable(every):
            return When(every, each_step=True)
        wrong = ": a number must be whole and at least 1" if isinstance(every, float | SupportsIndex) else ""
        raise CadenceError(f"{every!r} is no cadence{wrong}. Use one of: {FORMS}")

    @property
    def sleeps_long(self) -> bool:
        return self.unit == "s" or (self.unit != "epoch" and self.interval >= LONG)

    @property
    def whole(self) -> bool:
        """Whether the interval is a whole number of its unit."""
        return self.interval.denominator == 1

    @property
    def whole_epochs(self) -> bool:
        """Whether it counts whole epochs, and so is asked at the end of an epoch."""
        return self.unit == "epoch" and self.whole

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        if self.unit == "epoch" and not self.whole_epochs:
            batches = limits.batches_per_epoch or 1  # `check` has refused a loader without length
            return int((at.epoch * batches + at.batch_in_epoch) // (self.interval * batches))
        return int(_counter(at, self.unit) // self.interval)

    def base(self, at: Progress) -> Counters:
        return at.origin if self.unit != "epoch" or self.whole_epochs else at.fractions_from

    def asleep_until(self, at: Progress) -> tuple[Callable[[Progress], int], float] | None:
        following = (self.passed(at, at) + 1) * self.interval
        if self.unit == "epoch" and not self.whole_epochs:
            batches = at.batches_per_epoch or 1
            # It is looked at in each epoch: the next one may have another number of batches, if other ranks began this one.
            due = following * batches if following < at.epoch + 1 else (at.epoch + 1) * batches
            return (lambda now: now.epoch * batches + now.batch_in_epoch), float(due)
        if self.unit == "s":
            return None
        return at.reader(self.unit), float(following)

    @property
    def stride(self) -> tuple[int, int]:
        return (self.interval, 0) if isinstance(self.interval, int) and self.unit in ("step", "batch", "sample") else (0, 0)

    def gated(self, act: Callable[..., object]) -> Callable[..., bool]:
        return TimedGate(self, act) if self.unit == "s" else CrossingGate(self, act)

    def check(self, limits: Progress) -> None:
        if self.unit == "epoch" and not self.whole_epochs and limits.batches_per_epoch is None:
            raise CadenceError(
                f"'{self}' needs a loader that knows its length (has __len__); this one does not. "
                'Use a cadence in "steps", "batches", "samples" or "min" instead.'
            )

    def never(self, limits: Progress, accumulate: int) -> str | None:
        if self.unit == "epoch" and not self.whole_epochs:
            batches = self.interval * (limits.batches_per_epoch or 0)
            return _too_late(batches, "batch", limits, accumulate) if batches else None
        if self.unit in ("epoch", "step", "batch"):
            return _too_late(self.interval, self.unit, limits, accumulate)
        return None

    def __str__(self) -> str:
        if self.unit != "s":
            return f"every {_amount(self.interval, self.unit)}"
        size, name = next(((size, name) for name, size in (("h", 3600), ("min", 60)) if self.interval >= size), (1, "s"))
        return f"every {float(self.interval / size):g} {name}"


_UNITS: dict[str, tuple[Literal["epoch", "step", "batch", "sample", "s"], int]] = {
    **dict.fromkeys(("epoch", "epochs"), ("epoch", 1)),
    **dict.fromkeys(("step", "steps"), ("step", 1)),
    **dict.fromkeys(("batch", "batches"), ("batch", 1)),
    **dict.fromkeys(("sample", "samples"), ("sample", 1)),
    **dict.fromkeys(("s", "second", "seconds"), ("s", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("s", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("s", 3600)),
}


def _read(text: str) -> Cadence:
    from fractions import Fraction  # here, as it takes longer to import than most of us

    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None:
        hint = f" Did you mean {text.strip()}, without quotes?" if text.strip().isdigit() else ""
        raise CadenceError(f"{text!r} is no cadence: expected a number and a unit.{hint} Use one of: {FORMS}")
    number, word = match.groups()
    if word not in _UNITS:
        raise CadenceError(f"{text!r} is no cadence: unknown unit {word!r}.{nearest(word, _UNITS)} Use one of: {FORMS}")
    unit, size = _UNITS[word]
    interval = Fraction(number.replace("_", "")) * size
    if interval <= 0:
        raise CadenceError(f"{text!r} is no cadence: the number must be greater than 0.")
    if interval.denominator != 1 and unit in ("step", "batch", "sample"):
        raise CadenceError(f"{text!r} is no cadence: {word} come in whole numbers. Use one of: {FORMS}")
    return Cadence(int(interval) if interval.denominator == 1 else interval, unit)  # whole numbers are counted faster


def whole_number(value: object) -> int | None:
    """Return an integer, NumPy's too, as an ``int``; None for anything else and for a bool."""
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None


def _counter(at: Progress | Counters, unit: str) -> float | int:
    match unit:
        case "step":
            return at.step
        case "batch":
            return at.batch
        case "epoch":
            return at.epoch
        case "sample":
            return at.samples
        case _:  # seconds; the clock of a fit starts at 0
            return at.elapsed_s if isinstance(at, Progress) else 0


def _amount(count: Fraction | int, unit: str) -> str:
    plural = {"batch": "batches"}.get(unit, unit + "s")
    if count == 1:
        return unit
    return f"{int(count) if count == int(count) else f'{float(count):g}'} {unit if count <= 1 else plural}"


def _too_late(count: Fraction | int, unit: Unit, limits: Progress, accumulate: int, *, begun: bool = False) -> str | None:
    total, known = limits.at_most(unit, accumulate), limits.total(unit, accumulate) is not None
    most = limits.begun(unit, accumulate) if begun and known else total
    if total is None or most is None or count <= most:
        return None
    if total == 0:
        return f"the run ends before the first {unit} is over"
    return f"the run ends after {'' if known else 'at most '}{_amount(total, unit) if total != 1 else '1 ' + unit}"
