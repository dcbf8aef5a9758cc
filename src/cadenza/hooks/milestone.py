"""A point of a run that is reached once: ``"3 epochs"``."""

from __future__ import annotations

from cadenza.errors import CadenceError
from cadenza.hooks.cadence import Cadence
from cadenza.hooks.schedule import Timer, counter
from cadenza.status.progress import Progress


class Milestone(Cadence):
    """A cadence of which only the first time counts. Whether it is reached is a function of the counters.

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

    def timer(self, *, once: bool = True) -> Timer:
        return Cadence.timer(self, once=once)

    def reached(self, progress: Progress) -> bool:
        """Return whether these counters are at this point of the run, or after it."""
        batches = progress.batches_per_epoch
        if self.unit == "epoch" and not self.whole and batches:
            return progress.epoch * batches + progress.batch_in_epoch >= self.interval * batches
        return counter(progress, "epoch" if self.unit == "s" else self.unit) >= self.interval

    def __str__(self) -> str:
        said = super().__str__().removeprefix("every ")
        return f"after {said}" if self.interval != 1 else f"after 1 {self.unit}"
