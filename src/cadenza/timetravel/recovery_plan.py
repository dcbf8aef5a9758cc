"""What a run does otherwise after `Recover` has taken it back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

_IDLE = 2  # two bad batches in a row need as many rollbacks to one checkpoint


@dataclass(slots=True)
class Plan:
    """What follows from the rollbacks so far, as plain data for ``run.json`` and checkpoints. Steps are counted from 1."""

    count: int = 0
    """The number of rollbacks."""
    to: int | None = None
    """The step of the checkpoint to which the last one went back."""
    sign: int = 0
    """The step with the sign."""
    guard: int = 0
    """The last step of which each batch is checked before its gradient is added."""
    skips: list[Any] = field(default_factory=list)
    """Ranges of batches that are left out: the first one, and the one after the last, each an epoch and a number in it."""
    rates: list[Any] = field(default_factory=list)
    """The step after which the rates are multiplied, the last such step, and the factor."""
    earlier: list[Any] = field(default_factory=list)
    """`to`, `guard` and `rates` of the rollbacks before, as far as they hold for steps before `to`."""
    told: dict[str, Any] = field(default_factory=dict)
    """The facts of the decision."""
    idle: int = 0
    """How many rollbacks in a row went to one checkpoint from which no step was trained."""
    trained: bool = False
    """Whether a step was trained since the last rollback."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the plan of a result of `to_plain`."""
        return cls(**deepcopy(dict(plain)))

    def to_plain(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)

    def in_force(self, step: int) -> tuple[int, list[Any]]:
        """Return `guard` and `rates` of the rollback after which a step was done.

        It is the last rollback, but for a repetition of past steps (`replay_step`), which may begin before it.
        """
        if self.to is None or step > self.to:
            return self.guard, self.rates
        _, guard, rates = next((one for one in reversed(self.earlier) if one[0] < step), (0, 0, []))
        return guard, rates

    def in_vain(self, step: int) -> tuple[bool, int]:
        """Return whether the last rollback did not help against a sign in `step`, and the next value of `idle`.

        It did not if other batches broke the run, or if the weights in the checkpoint are broken already.
        """
        if self.to is None:
            return False, 0
        idle = 0 if self.trained else self.idle + 1
        return step <= self.sign or idle >= _IDLE, idle

    def earlier_than(self, to: int) -> list[Any]:
        """Return `earlier` of a plan that goes back to the step `to`."""
        own = [] if self.to is None else [[self.to, self.guard, self.rates]]
        return [one for one in (*self.earlier, *own) if one[0] < to]
