"""Schedules: when a listener is called. Whoever changes how ``every=`` works reads this folder, and this page first.

A `Schedule` is a value without state, such as ``Every("500 steps")`` or ``At("3 epochs") | First("10 steps")``. It answers two
questions about a firing of a moment, from two readings of the counters (`cadenza.hooks.counters.Reading`) and nothing else:

- `Schedule.due(now, before)`: is the listener called, by the counters now and at the last firing that was looked at?
- `Schedule.steady(now)`: which answer is sure for the firings that follow, and until which values of counters?

So a checkpoint holds one reading for each moment, and a resumed run calls a listener at the same steps as one that went on. On
multiple ranks, counters and clock are those of all ranks: each comes to the same answers without asking the others.

A point is due at the first firing of the moment at which its counter has reached it. Counters may jump (samples do); a step
that failed and an epoch that was cut short count for nothing. A window is due each time that the moment belongs to one of its
steps, epochs, and so on. The function of a `When` is the one part of a schedule that is no function of counters.

`cadenza.hooks.listener` asks a schedule in a run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from cadenza.errors import ScheduleError
from cadenza.hooks.counters import LENGTHS, STEP_END, Bound, Counting, Length, Reading, Unit, check_length, reading, too_late
from cadenza.status.formats import plural
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.run import Run
    from cadenza.status.progress import Progress

FORMS = f'{LENGTHS}, a schedule such as Every("500 steps") | At("3 epochs"), or a function (run) -> bool'
"""What ``every=`` accepts, for messages."""


class Schedule(ABC):
    """When a hook is called: `Every`, `At`, `First`, `Last`, `Between`, `When`, and what ``|``, ``&`` and ``~`` make of them.

    A moment, such as ``on_step_end``, fires many times. Each time, a schedule is due or not:

    ==============================  ==========================================================================
    ``Every("500 steps")``          a pulse: at the first firing of the moment after each 500 steps
    ``At("3 epochs")``              a pulse: once, at the first firing after 3 epochs
    ``First("10 steps")``           a window: each time that the moment fires in the first 10 steps
    ``Last("1 epoch")``             a window: each time in the last epoch of a run of known length
    ``Between("1 h", "2 h")``       a window: each time after the first hour and until the end of the second
    ``When(function)``              each time that ``function(run)`` is true
    ``one | other``                 each time that one of them is due; once if both are
    ``pulse & window``              each pulse inside the window
    ``pulse & pulse``               each time that both are due at the same firing
    ``~window``                     each time outside the window
    ``~pulse``                      each time that the pulse is not due
    ==============================  ==========================================================================

    A length is a number and a unit: steps, batches, epochs (``"0.25 epoch"`` too), samples, tokens, s, min, h, d, or ``"10%"``
    of the run. A bare number counts what the moment counts: steps, batches, epochs or, for a moment without a counter such as
    ``on_eval_end``, how often it fired in the run. Times count from the start of this fit, and are due at the end of a
    completed step. All others depend on the counters of the run: they are the same after a resume, and on all ranks.

    >>> from cadenza import Callback, First, on
    >>> from cadenza.testing import tiny_run
    >>> steps = []
    >>> note = on(Callback.on_step_end, every=Every("2 steps") & ~First("4 steps") | At("1 epoch"))
    >>> run = tiny_run(epochs=2, callbacks=[note(lambda run: steps.append(run.progress.step))])
    >>> steps
    [6, 8, 10]
    """

    __slots__ = ()

    @abstractmethod
    def due(self, now: Reading, before: Reading) -> bool:
        """Return whether a listener is called at the firing of `now`; `before` is the reading of an earlier firing."""

    def steady(self, now: Reading) -> Steady:
        """Return the answer that is sure at the firings after `now`, or None; and values of counters below which it is."""
        return None, ()

    def counting(self, unit: Unit) -> Schedule:
        """Return the same schedule in which bare numbers count `unit`."""
        return self

    def check(self, limits: Progress) -> None:
        """Raise `ScheduleError` if a run with these limits cannot tell when the listener is due."""
        for length in self.lengths:
            check_length(self, length, limits)

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        """Return why the listener is never due in a run with these limits; None if it may be due."""
        return None

    def leaves(self) -> Iterator[Schedule]:
        """Yield the schedules of which this one is composed."""
        yield self

    @property
    def lengths(self) -> Sequence[Length]:
        """The lengths in it; none in a function."""
        return ()

    @property
    def only_epochs(self) -> bool:
        """Whether it can be due at the end of whole epochs only."""
        return False

    def __or__(self, other: Schedule) -> Schedule:
        return NotImplemented if getattr(other, "is_keep_rule", False) else Composite.of("|", self, other)

    def __and__(self, other: Schedule) -> Schedule:
        return Composite.of("&", self, other)

    def __invert__(self) -> Schedule:
        return Composite("~", (self,))

    @staticmethod
    def parse(every: Interval, unit: Unit = "step") -> Schedule:
        """Read what ``every=`` accepts: a number, a text such as ``"500 steps"``, a schedule, or a function of the run.

        Args:
            every: The number, text, schedule or function.
            unit: What bare numbers count.

        Raises:
            ScheduleError: `every` has none of these forms, which the message lists.

        >>> Schedule.parse("0.25 epoch"), Schedule.parse(500)
        (Every('0.25 epoch'), Every('500 steps'))
        >>> Schedule.parse("500 stps")
        Traceback (most recent call last):
            ...
        cadenza.errors.ScheduleError: '500 stps' is no schedule: unknown unit 'stps'. Did you mean 'steps'? Use one of: \
500 (steps), "500 steps", "1 epoch", "0.25 epoch", "2000 batches", "50000 samples", "1e9 tokens", "30 s", "10 min", "2 h", \
"10%", a schedule such as Every("500 steps") | At("3 epochs"), or a function (run) -> bool
        """
        if isinstance(every, Schedule):
            return every.counting(unit)
        if callable(every):
            return When(every)
        return Every(Length.parse(every, FORMS).of(unit))


Steady = tuple[bool | None, Sequence[Bound]]
"""The answer at the firings that follow, or None if it may change at each; and the counters at which it may change."""

Interval = int | str | Schedule | Callable[["Run"], bool]
"""What ``every=`` accepts: a number, a text, a schedule, or a function (run) -> bool that is called after each step."""


# -- pulses -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False, init=False)
class _OfLengths(Schedule):
    """A schedule that is made of lengths."""

    lengths: tuple[Length, ...]

    def counting(self, unit: Unit) -> Self:
        return type(self)(*(length.of(unit) for length in self.lengths))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(length.text) for length in self.lengths)})"


class OfLength(_OfLengths):
    """A schedule that has one length: the base class of `Every`, `At`, `First` and `Last`."""

    __slots__ = ()

    def __init__(self, length: int | str | Length) -> None:
        object.__setattr__(self, "lengths", (Length.parse(length),))

    @property
    def length(self) -> Length:
        """The length."""
        return self.lengths[0]

    @property
    def count(self) -> Fraction | int:
        """The number of units; of seconds for a time."""
        return self.length.count

    @property
    def unit(self) -> Unit:
        """The unit; empty for a bare number."""
        return self.length.unit


class Every(OfLength):
    """Due at each multiple of a length.

    Args:
        length: The interval, such as ``"500 steps"``, ``"0.25 epoch"``, ``"10 min"`` or ``"10%"``.

    Raises:
        ScheduleError: `length` cannot be read.

    >>> print(Every("500 steps"), "-", Every("1 epoch"))
    every 500 steps - every epoch
    """

    __slots__ = ()  # what it holds is what `OfLength` holds

    once: ClassVar[bool] = False

    @property
    def only_epochs(self) -> bool:
        return self.length.whole_epochs

    def due(self, now: Reading, before: Reading) -> bool:
        passed = self._passed(now)
        return passed > self._passed(before) and (self.length.unit != "s" or now.counts["step"] > before.counts["step"])

    def steady(self, now: Reading) -> Steady:
        passed, length = self._passed(now), self.lengths[0]
        return False, () if self.once and passed else (now.bound(length.measure, (passed + 1) * length.count),)

    def _passed(self, at: Reading) -> int:
        """Return how many of its points the run has reached."""
        length = self.lengths[0]  # `self.length` takes 40 ns more
        passed = int(at.reached(length.measure) // length.count)
        return min(1, passed) if self.once else passed

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        return too_late(self.length, limits, accumulate, begun=on.begun and self.unit == on.unit)

    def __str__(self) -> str:
        return f"every {self.length}"


class At(Every):
    """Due once, at the first firing of the moment after a length.

    Args:
        length: The point of the run, such as ``"3 epochs"``, ``"500 steps"`` or ``"50%"``.

    Raises:
        ScheduleError: `length` cannot be read.

    >>> print(At("3 epochs"), "-", At("50%"))
    at epoch 3 - at 50%
    """

    __slots__ = ()  # what it holds is what `Every` holds

    once: ClassVar[bool] = True

    def reached(self, progress: Progress) -> bool:
        """Return whether a run is at this point, or after it."""
        return self._passed(reading(progress, progress, STEP_END, (self.length.measure,))) > 0

    def __str__(self) -> str:
        count, unit = self.length.count, self.length.unit
        if unit == "time":
            return f"at time {count}"
        return f"at {unit} {count}" if self.length.whole and unit in ("epoch", "step", "batch") else f"at {self.length}"


# -- windows ----------------------------------------------------------------------------------------

Edge = tuple[str, Any] | None
"""A unit, and the point of the run in it; None for the start, or the end, of the run."""


class _Window(Schedule):
    """A schedule that is due each time behind one point of the run and not behind another one."""

    __slots__ = ()

    def due(self, now: Reading, before: Reading) -> bool:
        start, end = self._edges(now)
        return (start is None or _behind(now, start)) and not (end is not None and _behind(now, end))

    def steady(self, now: Reading) -> Steady:
        edges = (edge for edge in self._edges(now) if edge is not None and not _behind(now, edge))
        return self.due(now, now), [now.bound(*edge) for edge in edges]

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


class Between(_Window, _OfLengths):
    """Due each time after `start` and until `end`, which is included: ``(start, end]``.

    Args:
        start: The length of the run before the window, such as ``"1000 steps"``; 0 for its start.
        end: The length of the run at the end of the window.

    Raises:
        ScheduleError: `start` or `end` cannot be read, or `end` is not after `start`.

    >>> print(Between("1000 steps", "5000 steps"), "-", Between("1 epoch", "50%"))
    between 1000 and 5000 steps - between 1 epoch and 50%
    """

    __slots__ = ()

    def __init__(self, start: int | str | Length, end: int | str | Length) -> None:
        first, last = Length.parse(start, zero=True), Length.parse(end)
        if first.unit == last.unit and first.count >= last.count:
            raise ScheduleError(f"Between({first.text!r}, {last.text!r}) is empty: the second point must be after the first.")
        object.__setattr__(self, "lengths", (first, last))

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        start, _ = self.lengths
        if not start.whole or start.unit not in ("step", "batch", "epoch"):
            return too_late(start, limits, accumulate)
        return too_late(replace(start, count=start.count + 1), limits, accumulate, begun=start.unit == "epoch")

    def _edges(self, now: Reading) -> tuple[Edge, Edge]:
        start, end = self.lengths
        return start.point, end.point

    def __str__(self) -> str:
        first, last = self.lengths
        start: object = first.text
        if first.unit == last.unit and last.unit not in ("s", "%"):
            start = f"{float(first.count):g}" if not first.whole else first.count
        return f"between {start} and {last.text}"


# -- functions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class When(Schedule):
    """Due each time that a function of the run is true; on all ranks if it is on one.

    The function may read what differs by rank, such as ``run.loss``. At a moment that counts steps, batches or epochs, it is
    called once after each completed step. At the end of steps, ranks wait for each other only where it is true.

    Args:
        function: ``function(run)`` returns a bool.

    >>> print(When(lambda run: run.loss < 0.1))
    when <lambda>
    """

    function: Callable[[Run], bool]
    alone: bool = False
    """Whether each rank asks for itself, each time: ``when=`` of `on`."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"When needs a function (run) -> bool; got {self.function!r}")

    def due(self, now: Reading, before: Reading) -> bool:
        return now.ask is not None and now.ask(self)

    def __repr__(self) -> str:
        return f"When({brief(self.function)})"

    def __str__(self) -> str:
        return f"when {brief(self.function)}"


@dataclass(frozen=True, slots=True)
class Until(Schedule):
    """Each time while fewer steps than `end` returns are complete; then never again."""

    end: Callable[[], float]

    def due(self, now: Reading, before: Reading) -> bool:
        return now.counts["step"] < self.end()

    def steady(self, now: Reading) -> Steady:
        return None if self.due(now, now) else False, ()  # the function may return another end at each firing

    def __repr__(self) -> str:
        return f"Until({brief(self.end)})"

    def __str__(self) -> str:
        return "in its first steps"


# -- composed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Composite(Schedule):
    """Due when one of its parts is due (``|``), when all are (``&``), or when its only part is not (``~``)."""

    operator: Literal["|", "&", "~"]
    parts: tuple[Schedule, ...]

    @staticmethod
    def of(operator: Literal["|", "&"], schedule: Schedule, other: object) -> Composite:
        """Return the composite of two schedules.

        Raises:
            TypeError: `other` is not a schedule.
        """
        if not isinstance(other, Schedule):
            raise TypeError(f'expected a schedule on both sides of {operator}, such as Every("500 steps"); got {other!r}')
        nested = (
            part.parts if isinstance(part, Composite) and part.operator == operator else (part,) for part in (schedule, other)
        )
        return Composite(operator, tuple(chain(*nested)))

    def due(self, now: Reading, before: Reading) -> bool:
        asked = sorted(self.parts, key=has_function)  # functions last: they are called only where they decide
        answers = (part.due(now, before) for part in asked)
        return not any(answers) if self.operator == "~" else (all if self.operator == "&" else any)(answers)

    def steady(self, now: Reading) -> Steady:
        answers, bounds = zip(*(part.steady(now) for part in self.parts), strict=True)
        decides = self.operator == "|"  # the answer of one part that is that of the whole
        if None in answers and decides not in answers:
            return None, ()
        answer = not answers[0] if self.operator == "~" else decides if decides in answers else not decides
        return answer, [*chain(*bounds)]

    def counting(self, unit: Unit) -> Composite:
        return Composite(self.operator, tuple(part.counting(unit) for part in self.parts))

    def check(self, limits: Progress) -> None:
        for part in self.parts:
            part.check(limits)

    def never(self, limits: Progress, accumulate: int, on: Counting = STEP_END) -> str | None:
        reasons = [part.never(limits, accumulate, on) for part in self.parts]
        if self.operator == "~" or (self.operator == "|" and None in reasons):
            return None
        return next((reason for reason in reasons if reason is not None), None)

    def leaves(self) -> Iterator[Schedule]:
        return chain.from_iterable(part.leaves() for part in self.parts)

    @property
    def lengths(self) -> Sequence[Length]:
        return [length for part in self.parts for length in part.lengths]

    @property
    def only_epochs(self) -> bool:
        return (any if self.operator == "&" else all)(part.only_epochs for part in self.parts)

    def __repr__(self) -> str:
        return self._joined(repr, f" {self.operator} ", "~")

    def __str__(self) -> str:
        return self._joined(str, " or " if self.operator == "|" else " and ", "not ")

    def _joined(self, text: Callable[[Schedule], str], between: str, inverts: str) -> str:
        nested = (isinstance(part, Composite) and part.operator != "~" for part in self.parts)
        texts = [f"({text(part)})" if is_nested else text(part) for part, is_nested in zip(self.parts, nested, strict=True)]
        return inverts + texts[0] if self.operator == "~" else between.join(texts)


def has_function(schedule: Schedule) -> bool:
    """Return whether a function is a part of a schedule: when it is due does not follow from counters alone."""
    return not all(leaf.lengths for leaf in schedule.leaves())


def brief_setting(value: object) -> str:
    """Return the text of an argument in the ``repr`` of its owner: an interval is shown as ``every=`` takes it."""
    if isinstance(value, Length) or type(value) is Every:
        return repr((value if isinstance(value, Length) else value.length).text)
    return brief(value)
