"""Lengths of a run, such as ``"500 steps"``: a number and its unit. All schedules are made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from cadenza.errors import ScheduleError, nearest
from cadenza.hooks.counting import COUNTERS
from cadenza.hooks.numbers import whole_number
from cadenza.status.formats import plural

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.status.progress import Progress

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
