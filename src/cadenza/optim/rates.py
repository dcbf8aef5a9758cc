"""The learning rates that are in force: those of the optimizers, and what a warm-up makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from cadenza.errors import CallbackError

if TYPE_CHECKING:
    from cadenza.run import Run

Factor = Callable[[int], float]


class Rates:
    """Factors on the learning rates.

    A scheduler must not see a rate that is scaled for a while, or it would go on from there. So optimizers hold their
    schedule's own rates between updates, and a factor is a function of the step alone, applied around the update.
    """

    def __init__(self) -> None:
        self.factors: dict[int, list[Factor]] = {}
        """By the optimizer's place in the run: functions of the number, from 1, of the step; their product counts."""

    def factor(self, optimizer: int, step: int) -> float:
        """Return what the rates of an optimizer are multiplied by in a step."""
        factors = self.factors.get(optimizer)
        return prod(factor(step) for factor in factors) if factors else 1.0

    def of(self, run: Run) -> list[float]:
        """Return the rate of each parameter group, over all optimizers, in the next update."""
        step = run.progress.step + 1
        return [
            float(group["lr"]) * self.factor(place, step)
            for place, optimizer in enumerate(run.optimizers)
            for group in optimizer.param_groups
        ]


class SetsRates(ABC):
    """A callback that steps the schedule of one optimizer."""

    @abstractmethod
    def aim(self, optimizers: Sequence[Optimizer] | None) -> object:
        """Return the optimizer of which the rates are set, or its index in the run if that is all that is known yet."""


def check_one_each(callbacks: Mapping[str, object], optimizers: Sequence[Optimizer] | None) -> None:
    """Raise `CallbackError` if two callbacks step schedules of one optimizer: their factors would multiply.

    Args:
        callbacks: Those of the run, by name.
        optimizers: Those of the run; None: they are not made yet.
    """
    names: dict[object, str] = {}
    for name, one in callbacks.items():
        if isinstance(one, SetsRates) and (other := names.setdefault(one.aim(optimizers), name)) != name:
            raise CallbackError(
                f"{other} and {name} set the learning rate of the same optimizer, and their schedules would multiply. Keep "
                "one: torch's SequentialLR puts schedules one after the other, ChainedScheduler multiplies them, and Warmup "
                "goes with any. For several optimizers say which: LearningRate(..., optimizer=1)."
            )
