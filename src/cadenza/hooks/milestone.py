"""A point of a run that is reached once: ``"3 epochs"``."""

from __future__ import annotations

import math
from collections.abc import Callable

from cadenza.errors import CadenceError
from cadenza.hooks.cadence import Cadence
from cadenza.status.progress import Counters, Progress


class Milestone(Cadence):
    """A cadence that fires the first time only. Whether it is reached is a function of the counters.

    >>> print(Milestone.at("3 epochs"), Milestone.at("1 epoch"))
    after 3 epochs after 1 epoch
    >>> Milestone.at("10 min")
    Traceback (most recent call last):
        ...
    cadenza.errors.CadenceError: '10 min' is no point of a run that is the same after a resume: expected epochs, steps, \
batches or samples, such as "3 epochs"
    """

    __slots__ = ()

    @staticmethod
    def at(text: str) -> Milestone:
        """Read a milestone.

        Raises:
            CadenceError: `text` is no cadence, or counts what a resumed run counts anew.
        """
        cadence = Cadence.parse(text)
        if not isinstance(cadence, Cadence) or cadence.unit == "s":
            raise CadenceError(
                f"{text!r} is no point of a run that is the same after a resume: expected epochs, steps, batches or samples, "
                'such as "3 epochs"'
            )
        return Milestone(cadence.interval, cadence.unit)

    def passed(self, at: Progress | Counters, limits: Progress) -> int:
        return min(1, super().passed(at, limits))

    @property
    def sleeps_long(self) -> bool:
        return self.unit == "step"

    def asleep_until(self, at: Progress) -> tuple[Callable[[Progress], int], float] | None:
        return (at.reader("step"), math.inf) if self.reached(at) else super().asleep_until(at)

    def reached(self, progress: Progress) -> bool:
        """Return whether it lies behind."""
        return self.passed(progress, progress) == 1

    def __str__(self) -> str:
        said = super().__str__().removeprefix("every ")
        return f"after {said}" if self.interval != 1 else f"after 1 {self.unit}"
