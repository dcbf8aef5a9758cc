"""The number of batches in a step, where it changes during a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from cadenza.status.formats import counted

if TYPE_CHECKING:
    from fractions import Fraction


class At(Protocol):
    """Counters, as `Counters` and `Progress` have them."""

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def batch_in_epoch(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Limits(Protocol):
    """The limits of a run, as `Progress` has them."""

    @property
    def max_epochs(self) -> int | None: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def batches_per_whole_epoch(self) -> int | None: ...


CountersT = TypeVar("CountersT", bound=Any)


class Both(At, Limits, Protocol):
    """The counters and the limits of a run."""


@dataclass(frozen=True, slots=True)
class Change:
    """A point of the run, and the batches in a step from there on. Whether it is reached is a function of the counters."""

    count: Fraction | int
    unit: Literal["step", "batch", "epoch", "sample", "token", "%"]
    batches: int
    text: str
    """The point, as the user wrote it."""

    def reached(self, at: At, limits: Limits) -> bool:
        """Return whether these counters are at this point of the run, or after it."""
        if self.unit == "sample":
            return at.samples >= self.count
        if self.unit == "token":
            return at.tokens >= self.count
        return self.steps_left(at, limits, 1) <= 0

    def steps_left(self, at: At, limits: Limits, size: int) -> float:
        """Return after how many steps of `size` batches it is reached, inside of the epoch; infinite if not in this epoch."""
        count, per_epoch = self.count, limits.batches_per_whole_epoch
        if self.unit == "step":
            return float(count - at.step)
        if self.unit == "batch":
            return math.ceil((count - at.batch) / size)
        if self.unit == "epoch":
            return _steps_to(count, at, per_epoch, size)
        if self.unit == "%":  # of the limit to which the run is nearest
            part, left = count / 100, math.inf
            if limits.max_steps is not None:
                left = min(left, math.ceil(part * limits.max_steps) - at.step)
            if limits.max_epochs is not None:
                left = min(left, _steps_to(part * limits.max_epochs, at, per_epoch, size))
            if limits.max_tokens is not None:
                left = min(left, 0 if at.tokens >= part * limits.max_tokens else 1)
            return left
        return 1  # how many samples or tokens the next step has is not known

    def is_countable(self, limits: Limits) -> bool:
        """Return whether the step at which it is reached can be computed."""
        return self.unit not in ("sample", "token") and not (self.unit == "%" and limits.max_tokens is not None)


def _steps_to(epochs: Fraction | float, at: At, per_epoch: int | None, size: int) -> float:
    """Return after how many steps so many epochs, whole or not, are complete; whole epochs only count as such."""
    if at.epoch >= epochs:
        return 0
    if int(epochs) == epochs or per_epoch is None:
        return math.inf
    left = math.ceil((epochs - at.epoch) * per_epoch) - at.batch_in_epoch
    return math.ceil(left / size)


class Accumulation(int):
    """The batches in a step by points of the run: ``Trainer(accumulate={0: 1, "2000 steps": 4})`` makes one.

    As a number it is the most batches that a step of the run has. Of the points that are reached, the last one in order holds,
    from the next step on. It depends on the counters of the run alone, so it is the same on all ranks and after a resume.
    """

    first: int
    """The batches in a step until the first change."""
    changes: tuple[Change, ...]
    """The changes, in order."""

    def __new__(cls, first: int, changes: Sequence[Change]) -> Self:
        self = super().__new__(cls, max(first, *(change.batches for change in changes)))
        self.first, self.changes = first, tuple(changes)
        return self

    def __getnewargs__(self) -> Any:
        return self.first, self.changes

    def plain(self) -> dict[str, int]:
        """Return the batches by the text of the point."""
        return {"0": self.first, **{change.text: change.batches for change in self.changes}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accumulation) and self.plain() == other.plain()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.first, self.changes))

    def __str__(self) -> str:
        return ", ".join([counted(self.first, "batch"), *(f"{one.batches} from {one.text} on" for one in self.changes)])

    def __repr__(self) -> str:
        return repr(self.plain())

    def batches(self, at: At, limits: Limits) -> int:
        """Return the number of batches in the step after these counters."""
        reached = [change.batches for change in self.changes if change.reached(at, limits)]
        return reached[-1] if reached else self.first

    def next_step(self, at: Both) -> float:
        """Return how many steps are complete, at the earliest, at the next change in this epoch; infinite for none."""
        size = self.batches(at, at)
        left = [change.steps_left(at, at, size) for change in self.changes if not change.reached(at, at)]
        return at.step + max(1.0, min(left)) if left else math.inf

    def after_changes(self, origin: CountersT, limits: Limits, per_epoch: int, first: int) -> tuple[CountersT, int] | None:
        """Return the counters from which on steps have a constant number of batches, and that number; None if not known.

        Args:
            origin: The counters at which the run began.
            limits: The limits of the run.
            per_epoch: Batches in an epoch.
            first: Batches in the epoch in which the run began.
        """
        if not per_epoch:
            return None
        at = origin
        most_steps = math.inf if limits.max_steps is None else limits.max_steps
        most_epochs = math.inf if limits.max_epochs is None else limits.max_epochs
        while True:
            size = self.batches(at, limits)
            pending = [change for change in self.changes if not change.reached(at, limits)]
            if not pending or at.step >= most_steps or at.epoch >= most_epochs:
                return at, size
            if not all(change.is_countable(limits) for change in pending):
                return None
            left = (first if at.epoch == origin.epoch and at.batch_in_epoch else per_epoch) - at.batch_in_epoch
            nearest = max(1, min(change.steps_left(at, limits, size) for change in pending))
            steps = int(min(nearest, -(-left // size), most_steps - at.step))  # 0 after the last batch of an epoch
            at = _advanced(at, steps, min(steps * size, left), ends=steps * size >= left)


def _advanced(at: CountersT, steps: int, batches: int, *, ends: bool) -> CountersT:
    """Return the counters after so many steps; `ends`: these complete the epoch."""
    inside = 0 if ends else at.batch_in_epoch + batches
    return replace(at, epoch=at.epoch + ends, step=at.step + steps, batch=at.batch + batches, batch_in_epoch=inside)
