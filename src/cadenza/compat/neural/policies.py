"""Learning rate policies: functions of the initial rate, the step and the epoch (``nemo.utils.lr_policies``)."""

from __future__ import annotations

import math
from collections.abc import Callable

Policy = Callable[[float, int, int], float]


class WarmupPolicy:
    """The rate rises in a line for the first steps, and stays.

    The base of all policies; a subclass says in `rate` how it goes on. After `total_steps` it stays at `min_lr`.

    Args:
        warmup_steps: Steps in which the rate rises.
        warmup_ratio: The same as a share of all steps.
        total_steps: Steps in all; None has no end.

    Raises:
        ValueError: Both `warmup_steps` and `warmup_ratio`; or a share of steps whose number is not known.
    """

    min_lr = 0.0
    """After the warm-up the rate never falls below this."""

    def __init__(
        self, *, warmup_steps: int | None = None, warmup_ratio: float | None = None, total_steps: int | None = None
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps must be at least 1; got {total_steps!r}")
        self.total_steps = total_steps
        self.warmup_steps = _share("warmup", warmup_steps, warmup_ratio, total_steps)

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
        """The first step of the fall."""
        return self.warmup_steps

    def passed(self, step: int) -> float:
        """Return the share of the fall that has passed, from 0 to 1."""
        if self.total_steps is None:
            raise ValueError(f"{type(self).__name__} needs total_steps")
        return min(1.0, (step - self.first) / max(1, self.total_steps - self.first))


class WarmupHoldPolicy(WarmupPolicy):
    """The rate rises, and holds for some steps.

    Args:
        warmup_steps: Steps in which the rate rises.
        warmup_ratio: The same as a share of all steps.
        hold_steps: Steps in which it then holds.
        hold_ratio: The same as a share of all steps.
        total_steps: Steps in all; None has no end.
        min_lr: The rate never falls below this.
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
        self.hold_steps = self.warmup_steps + _share("hold", hold_steps, hold_ratio, total_steps)
        self.min_lr = min_lr

    @property
    def first(self) -> int:
        return self.hold_steps

    def __call__(self, initial_lr: float, step: int, epoch: int) -> float:
        if self.warmup_steps <= step < self.hold_steps:
            return initial_lr
        return super().__call__(initial_lr, step, epoch)


class _Annealing(WarmupPolicy):
    """A policy that falls to the end of a training.

    Args:
        total_steps: Steps in all.
        min_lr: The rate never falls below this.
        warmup_steps: Steps in which it rises before.
        warmup_ratio: The same as a share of all steps.
    """

    def __init__(
        self, total_steps: int, min_lr: float = 0.0, *, warmup_steps: int | None = None, warmup_ratio: float | None = None
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio, total_steps=total_steps)
        self.min_lr = min_lr


class SquareAnnealing(_Annealing):
    """Falls with the square of what is left; never below 1e-5 unless told."""

    def __init__(
        self, total_steps: int, min_lr: float = 1e-5, *, warmup_steps: int | None = None, warmup_ratio: float | None = None
    ) -> None:
        super().__init__(total_steps, min_lr, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr * (1 - self.passed(step)) ** 2


class SquareRootAnnealing(_Annealing):
    """Falls with the root of what is left of the whole training, warm-up included."""

    def rate(self, initial_lr: float, step: int) -> float:
        assert self.total_steps is not None, "the constructor demands it"
        return initial_lr * math.sqrt((self.total_steps - step) / self.total_steps)


class CosineAnnealing(_Annealing):
    """Falls along half a cosine (Loshchilov and Hutter 2017)."""

    def rate(self, initial_lr: float, step: int) -> float:
        if initial_lr < self.min_lr:
            raise ValueError(f"the initial learning rate {initial_lr} is below min_lr={self.min_lr}")
        return self.min_lr + (initial_lr - self.min_lr) * (1 + math.cos(math.pi * self.passed(step))) / 2


class WarmupAnnealing(_Annealing):
    """Falls in a line."""

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr * (1 - self.passed(step))


class InverseSquareRootAnnealing(_Annealing):
    """Falls with the inverse root of the step, counted in warm-ups (Vaswani et al. 2017)."""

    def rate(self, initial_lr: float, step: int) -> float:
        return initial_lr / math.sqrt((step + 1) / (self.warmup_steps + 1))


class PolynomialDecayAnnealing(_Annealing):
    """Falls with a power of what is left.

    Args:
        total_steps: Steps in all.
        min_lr: Where it ends.
        power: 1 is a line.
        warmup_steps: Steps in which it rises before.
        warmup_ratio: The same as a share of all steps.
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


def _share(name: str, steps: int | None, ratio: float | None, total: int | None) -> int:
    if steps is not None and ratio is not None:
        raise ValueError(f"expected {name}_steps or {name}_ratio; got both")
    if ratio is None:
        return steps or 0
    if total is None:
        raise ValueError(f"{name}_ratio is a share of all steps: give total_steps")
    return int(ratio * total)
