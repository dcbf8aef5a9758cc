"""Learning rate policies: functions of the initial rate, the step and the epoch (``nemo.utils.lr_policies``)."""

from __future__ import annotations

import math
from collections.abc import Callable

Policy = Callable[[float, int, int], float]


class WarmupPolicy:
    """Linear warm-up to the initial rate, then a constant rate.

    The base class of all policies. A subclass overrides `rate`. After `total_steps` the rate is `min_lr`.

    Args:
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
        total_steps: The total number of steps; None for no end.

    Raises:
        ValueError: Both `warmup_steps` and `warmup_ratio` are given, or a ratio without `total_steps`.
    """

    min_lr = 0.0
    """The lower bound of the rate after the warm-up."""

    def __init__(
        self, *, warmup_steps: int | None = None, warmup_ratio: float | None = None, total_steps: int | None = None
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps must be at least 1; got {total_steps!r}")
        self.total_steps = total_steps
        self.warmup_steps = _steps("warmup", warmup_steps, warmup_ratio, total_steps)

    def __call__(self, initial_lr: float, step: int, epoch: int) -> float:
        if step < self.warmup_steps:
            return initial_lr * (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is not None and step > self.total_steps:
            return self.min_lr
        return max(self.rate(initial_lr, step), self.min_lr)

    def rate(self, initial_lr: float, step: int) -> float:
        """Return the rate after the warm-up."""
        return initial_lr

    @property
    def first(self) -> int:
        """The first step of the decay."""
        return self.warmup_steps

    def passed(self, step: int) -> float:
        """Return the progress of the decay, from 0 to 1."""
        if self.total_steps is None:
            raise ValueError(f"{type(self).__name__} needs total_steps; got None")
        return min(1.0, (step - self.first) / max(1, self.total_steps - self.first))


class WarmupHoldPolicy(WarmupPolicy):
    """Linear warm-up, then the initial rate for some steps.

    Args:
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
        hold_steps: The number of steps at the initial rate.
        hold_ratio: The same as a fraction of `total_steps`.
        total_steps: The total number of steps; None for no end.
        min_lr: The lower bound of the rate.
    """

    def __init__(
        self,
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
        hold_steps: int | None = None,
        hold_ratio: float | None = None,
        total_steps: int | None = None,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio, total_steps=total_steps)
        self.hold_steps = self.warmup_steps + _steps("hold", hold_steps, hold_ratio, total_steps)
        self.min_lr = min_lr

    @property
    def first(self) -> int:
        return self.hold_steps

    def __call__(self, initial_lr: float, step: int, epoch: int) -> float:
        if self.warmup_steps <= step < self.hold_steps:
            return initial_lr
        return super().__call__(initial_lr, step, epoch)


class _Annealing(WarmupPolicy):
    """A policy that decays until the end of a training.

    Args:
        total_steps: The total number of steps.
        min_lr: The lower bound of the rate.
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
    """

    def __init__(
        self, total_steps: int, min_lr: float = 0.0, *, warmup_steps: int | None = None, warmup_ratio: float | None = None
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio, total_steps=total_steps)
        self.min_lr = min_lr


class SquareAnnealing(_Annealing):
    """Decays with the square of the remaining fraction of steps. The default of `min_lr` is 1e-5."""

    def __init__(
        self, total_steps: int, min_lr: float = 1e-5, *, warmup_steps: int | None = None, warmup_ratio: float | None = None
    ) -> None:
        super().__init__(total_steps, min_lr, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr * (1 - self.passed(step)) ** 2


class SquareRootAnnealing(_Annealing):
    """Decays with the square root of the remaining fraction of all steps, warm-up included."""

    def rate(self, initial_lr: float, step: int) -> float:
        assert self.total_steps is not None, "the constructor requires it"
        return initial_lr * math.sqrt((self.total_steps - step) / self.total_steps)


class CosineAnnealing(_Annealing):
    """Cosine decay (Loshchilov and Hutter 2017)."""

    def rate(self, initial_lr: float, step: int) -> float:
        if initial_lr < self.min_lr:
            raise ValueError(f"the initial learning rate {initial_lr} is below min_lr={self.min_lr}")
        return self.min_lr + (initial_lr - self.min_lr) * (1 + math.cos(math.pi * self.passed(step))) / 2


class WarmupAnnealing(_Annealing):
    """Linear decay."""

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr * (1 - self.passed(step))


class InverseSquareRootAnnealing(_Annealing):
    """Decays with the inverse square root of step / warm-up steps (Vaswani et al. 2017)."""

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr / math.sqrt((step + 1) / (self.warmup_steps + 1))


class PolynomialDecayAnnealing(_Annealing):
    """Decays with a power of the remaining fraction of steps.

    Args:
        total_steps: The total number of steps.
        min_lr: The final rate.
        power: The exponent; 1 gives linear decay.
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
    """

    def __init__(
        self,
        total_steps: int,
        min_lr: float = 0.0,
        power: float = 1.0,
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
    ) -> None:
        super().__init__(total_steps, min_lr, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
        self.power = power

    def rate(self, initial_lr: float, step: int) -> float:
        return self.min_lr + (initial_lr - self.min_lr) * math.pow(1 - self.passed(step), self.power)


def _steps(name: str, steps: int | None, ratio: float | None, total: int | None) -> int:
    if steps is not None and ratio is not None:
        raise ValueError(f"expected {name}_steps or {name}_ratio; got both")
    if ratio is None:
        return steps or 0
    if total is None:
        raise ValueError(f"{name}_ratio needs total_steps; got None")
    return int(ratio * total)
