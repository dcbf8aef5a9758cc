"""The learning rates in effect: those of the optimizers, times the factors of warm-ups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.errors import CallbackError

if TYPE_CHECKING:
    from cadenza.run import Run

Factor = Callable[[int], float]


class Rates:
    """Factors on the learning rates.

    A scheduler must not read a scaled rate, or it would continue from that rate. Between updates the optimizers therefore
    hold the rates of their schedules. A factor depends on the step alone and is applied around the update.
    """

    def __init__(self) -> None:
        self.factors: dict[int, list[Factor]] = {}
        """By the index of the optimizer in the run: functions of the step, counted from 1. Their product is applied."""
        self._kept: dict[int, list[tuple[dict[str, Any], Any]]] = {}
        self._kept_tensors: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def factor(self, optimizer: int, step: int) -> float:
        """Return the factor on the rates of an optimizer in a step."""
        factors = self.factors.get(optimizer)
        return prod(factor(step) for factor in factors) if factors else 1.0

    def apply(self, index: int, optimizer: Optimizer, step: int) -> None:
        """Multiply the rates of an optimizer by their factor, once, until `put_back`."""
        if index in self._kept:
            return
        factor, groups = self.factor(index, step), optimizer.param_groups
        self._kept[index] = kept = [(group, group["lr"]) for group in groups]
        # Each tensor once, because two groups may share it; in place, because captured graphs read its memory.
        tensors = {id(rate): rate for _, rate in kept if isinstance(rate, Tensor)}
        self._kept_tensors[index] = [(rate, rate.detach().clone()) for rate in tensors.values()]
        for group, rate in kept:
            if not isinstance(rate, Tensor):
                group["lr"] = rate * factor
        if tensors:
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.mul_(factor)

    def put_back(self, index: int) -> None:
        """Restore the rates before `apply`."""
        for group, rate in self._kept.pop(index, ()):
            group["lr"] = rate
        if tensors := self._kept_tensors.pop(index, ()):
            with torch.no_grad():
                for tensor, before in tensors:
                    tensor.copy_(before)

    def of(self, run: Run) -> list[float]:
        """Return the rate of each parameter group, over all optimizers, in the next update."""
        step = run.progress.step + 1
        return [
            float(group["lr"]) * self.factor(index, step)
            for index, optimizer in enumerate(run.optimizers)
            for group in optimizer.param_groups
        ]


class SetsRates(ABC):
    """A callback that steps the schedule of one optimizer."""

    given: Any
    """The scheduler, or the function that makes it."""

    @abstractmethod
    def aim(self, optimizers: Sequence[Optimizer] | None) -> object:
        """Return the optimizer that it changes, or the index of the optimizer if the optimizers are not made yet."""

    @abstractmethod
    def drives(self, optimizer: Optimizer) -> bool:
        """Return whether it changes the rates of `optimizer` in the current run."""

    @abstractmethod
    def renew(self, run: Run) -> None:
        """Make the scheduler again, from the rates that the optimizer has now."""


def optimizer_of(run: Run, index: int, *, needed_by: str) -> Optimizer:
    """Return an optimizer of the run by its index.

    Raises:
        ValueError: The run has no such optimizer.
    """
    if not 0 <= index < len(run.optimizers):
        raise ValueError(f"{needed_by}: optimizer must be an index from 0 to {len(run.optimizers) - 1}; got {index}")
    return run.optimizers[index]


def check_one_each(callbacks: Mapping[str, object], optimizers: Sequence[Optimizer] | None) -> None:
    """Raise `CallbackError` if two callbacks set the learning rate of one optimizer, because their schedules would multiply.

    Args:
        callbacks: The callbacks of the run, by name.
        optimizers: The optimizers of the run; None if they are not made yet.
    """
    names: dict[object, str] = {}
    for name, one in callbacks.items():
        if isinstance(one, SetsRates) and (other := names.setdefault(one.aim(optimizers), name)) != name:
            raise CallbackError(
                f"{other} and {name} set the learning rate of the same optimizer, and their schedules would multiply. Keep "
                "one: torch's SequentialLR runs schedules one after the other, ChainedScheduler multiplies them, and Warmup "
                "combines with any schedule. For several optimizers, choose one: LearningRate(..., optimizer=1)."
            )
