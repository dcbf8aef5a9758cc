"""What ``every=`` accepts: numbers, texts such as ``"500 steps"``, and functions. `cadenza.hooks.schedule` has the rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsIndex

from cadenza.errors import CadenceError, nearest
from cadenza.hooks.numbers import whole_number
from cadenza.hooks.schedule import ClockTimer, CountTimer, EpochTimer, Schedule, Timer, When, amount, too_late

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.run import Run
    from cadenza.status.progress import Progress

FORMS = (
    '500 (steps), "500 steps", "1 epoch", "0.25 epoch", "2000 batches", "50000 samples", "30 s", "10 min", "2 h", '
    "or a function (run) -> bool"
)

Interval = int | str | Schedule | Callable[["Run"], bool]
"""What ``every=`` accepts: a number of steps, a text, or a function (run) -> bool that is called after each step."""


@dataclass(frozen=True, slots=True)
class Cadence(Schedule):
    """An interval, as every ``every=`` takes it: ``500`` (steps), ``"500 steps"``, ``"1 epoch"``, ``"10 min"``.

    Whole epochs are checked at the end of an epoch, all others at the end of a step. `Cadence.parse` reads any of the forms.

    Args:
        interval: The length, greater than 0, in units. A time is in seconds.
        unit: The unit that is counted.

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
    def parse(every: Interval) -> Schedule:
        """Read a cadence. A whole number counts steps.

        Raises:
            CadenceError: `every` has none of the allowed forms, which the message lists.
        """
        if isinstance(every, Schedule):
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
    def whole(self) -> bool:
        """Whether the interval is a whole number of its unit."""
        return self.interval.denominator == 1

    @property
    def whole_epochs(self) -> bool:
        """Whether it counts whole epochs, and so is checked at the end of an epoch."""
        return self.unit == "epoch" and self.whole

    def timer(self, *, once: bool = False) -> Timer:
        if self.unit == "s":
            return ClockTimer(float(self.interval))
        if self.whole:
            return CountTimer(int(self.interval), self.unit, once=once)
        return EpochTimer(self.interval, once=once)

    def check(self, limits: Progress) -> None:
        if self.unit == "epoch" and not self.whole and limits.batches_per_epoch is None:
            raise CadenceError(
                f"'{self}' needs a loader that knows its length (has __len__); this one does not. "
                'Use a cadence in "steps", "batches", "samples" or "min" instead.'
            )

    def never(self, limits: Progress, accumulate: int) -> str | None:
        if self.unit == "epoch" and not self.whole:
            batches = self.interval * (limits.batches_per_epoch or 0)
            return too_late(batches, "batch", limits, accumulate) if batches else None
        if self.unit in ("epoch", "step", "batch"):
            return too_late(self.interval, self.unit, limits, accumulate)
        return None

    def __str__(self) -> str:
        if self.unit != "s":
            return f"every {amount(self.interval, self.unit)}"
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
    from fractions import Fraction  # here, as it takes 2 ms to import

    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None:
        hint = f" Did you mean {text.strip()}, without quotes?" if text.strip().isdigit() else ""
        raise CadenceError(f"{text!r} is no cadence: expected a number and a unit.{hint} Use one of: {FORMS}")
    number, unit_name = match.groups()
    if unit_name not in _UNITS:
        raise CadenceError(
            f"{text!r} is no cadence: unknown unit {unit_name!r}.{nearest(unit_name, _UNITS)} Use one of: {FORMS}"
        )
    unit, size = _UNITS[unit_name]
    interval = Fraction(number.replace("_", "")) * size
    if interval <= 0:
        raise CadenceError(f"{text!r} is no cadence: the number must be greater than 0.")
    if interval.denominator != 1 and unit in ("step", "batch", "sample"):
        raise CadenceError(f"{text!r} is no cadence: {unit_name} come in whole numbers. Use one of: {FORMS}")
    return Cadence(int(interval) if interval.denominator == 1 else interval, unit)
