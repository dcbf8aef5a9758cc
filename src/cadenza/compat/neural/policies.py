"""Learning rate policies: functions of the initial rate, the step and the epoch (``nemo.utils.lr_policies``)."""

from __future__ import annotations

import math
from collections.abc import Callable

from cadenza.errors import nearest

Policy = Callable[[float, int, int], float]


class WarmupPolicy:
    """Linear warm-up to the initial rate, then a constant rate; 0 after `total_steps`.

    The base class of all policies. A subclass overrides `_get_lr`.

    Args:
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
        total_steps: The total number of steps; None for no end.

    Raises:
        ValueError: Both `warmup_steps` and `warmup_ratio` are given, or a ratio without `total_steps`.
    """

    def __init__(
        self, *, warmup_steps: int | None = None, warmup_ratio: float | None = None, total_steps: int | None = None
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps must be at least 1; got {total_steps!r}")
        self.total_steps = total_steps
        self.warmup_steps: int = _steps("warmup", warmup_steps, warmup_ratio, total_steps)

    def __call__(self, initial_lr: float, step: int, epoch: int) -> float:
        if step < self.warmup_steps:
            return initial_lr * (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is not None and step > self.total_steps:
            return self._last_lr
        return self._get_lr(initial_lr, step, epoch)

    _last_lr = 0.0
    """The rate after `total_steps`."""

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        """Return the rate after the warm-up."""
        return initial_lr

    @property
    def _end(self) -> int:
        if self.total_steps is None:
            raise ValueError(f"{type(self).__name__} needs total_steps; got None")
        return self.total_steps


class WarmupHoldPolicy(WarmupPolicy):
    """Linear warm-up, then the initial rate; `min_lr` after `total_steps`.

    Args:
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
        hold_steps: The number of steps at the initial rate before a subclass decays it.
        hold_ratio: The same as a fraction of `total_steps`.
        total_steps: The total number of steps; None for no end.
        min_lr: The rate after `total_steps`.
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
        hold = _steps("hold", hold_steps, hold_ratio, total_steps)
        held = hold_steps is not None or hold_ratio is not None
        self.hold_steps: int = self.warmup_steps + hold if held else 0
        """The first step of the decay; 0 if no hold was given."""
        self._last_lr = min_lr

    def __call__(self, initial_lr: float, step: int, epoch: int) -> float:
        if self.warmup_steps <= step < self.hold_steps:
            return initial_lr
        return super().__call__(initial_lr, step, epoch)


class _Annealing(WarmupPolicy):
    """A policy that decays until the end of a training.

    Args:
        total_steps: The total number of steps.
        min_lr: The lower bound of the rate until `total_steps`.
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

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        return max(initial_lr * ((self._end - step) / (self._end - self.warmup_steps)) ** 2, self.min_lr)


class SquareRootAnnealing(_Annealing):
    """Decays with the square root of the remaining fraction of all steps, warm-up included."""

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        return max(initial_lr * math.sqrt((self._end - step) / self._end), self.min_lr)


class CosineAnnealing(_Annealing):
    """Cosine decay to `min_lr` (Loshchilov and Hutter 2017)."""

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        if initial_lr < self.min_lr:
            raise ValueError(f"the initial learning rate {initial_lr} is below min_lr={self.min_lr}")
        half_turn = math.pi * (step - self.warmup_steps) / (self._end - self.warmup_steps)
        return (initial_lr - self.min_lr) * (0.5 * (1 + math.cos(half_turn))) + self.min_lr


class _Endless(WarmupPolicy):
    """A policy without a lower bound.

    Args:
        total_steps: The total number of steps.
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
    """

    def __init__(self, total_steps: int, *, warmup_steps: int | None = None, warmup_ratio: float | None = None) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio, total_steps=total_steps)


class WarmupAnnealing(_Endless):
    """Linear decay to 0."""

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        passed, warmup = step / self._end, self.warmup_steps / self._end
        return initial_lr * max((passed - 1.0) / (warmup - 1.0), 0.0)


class InverseSquareRootAnnealing(_Endless):
    """Decays with the inverse square root of step / warm-up steps (Vaswani et al. 2017)."""

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        return float(initial_lr / ((step + 1) / (self.warmup_steps + 1)) ** 0.5)


class PolynomialDecayAnnealing(_Annealing):
    """Decays to `min_lr` with a power of the remaining fraction of steps.

    Args:
        total_steps: The total number of steps.
        min_lr: The final rate.
        power: The exponent; 1 gives linear decay.
        cycle: After the end of the decay, stretch it to the next multiple of its length. `total_steps` ends it before.
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
    """

    def __init__(
        self,
        total_steps: int,
        min_lr: float = 0.0,
        power: float = 1.0,
        cycle: bool = False,
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
    ) -> None:
        super().__init__(total_steps, min_lr, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
        self.power: float = power
        self.cycle: bool = cycle

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        passed, length = step - self.warmup_steps, self._end - self.warmup_steps
        return _polynomial(initial_lr, self.min_lr, _passed(passed, length, self.cycle), self.power)


class PolynomialHoldDecayAnnealing(WarmupHoldPolicy):
    """Linear warm-up, the initial rate for some steps, then a decay to `min_lr` with a power; 0 after `total_steps`.

    Args:
        total_steps: The total number of steps.
        min_lr: The final rate of the decay.
        power: The exponent; 1 gives linear decay.
        cycle: After the end of the decay, stretch it to the next multiple of its length.
        warmup_steps: The number of warm-up steps.
        warmup_ratio: The same as a fraction of `total_steps`.
        hold_steps: The number of steps at the initial rate. Without it, the decay counts from step 0, as in NeMo.
        hold_ratio: The same as a fraction of `total_steps`.
    """

    def __init__(
        self,
        total_steps: int,
        min_lr: float = 0.0,
        power: float = 1.0,
        cycle: bool = False,
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
        hold_steps: int | None = None,
        hold_ratio: float | None = None,
    ) -> None:
        super().__init__(
            warmup_steps=warmup_steps,
            warmup_ratio=warmup_ratio,
            hold_steps=hold_steps,
            hold_ratio=hold_ratio,
            total_steps=total_steps,
        )
        self.min_lr: float = min_lr
        self.power: float = power
        self.cycle: bool = cycle

    def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
        passed, length = step - self.hold_steps, self._end - max(self.warmup_steps, self.hold_steps)
        return _polynomial(initial_lr, self.min_lr, _passed(passed, length, self.cycle), self.power)


POLICIES: dict[str, type[WarmupPolicy]] = {
    kind.__name__: kind
    for kind in (
        CosineAnnealing,
        InverseSquareRootAnnealing,
        PolynomialDecayAnnealing,
        PolynomialHoldDecayAnnealing,
        SquareAnnealing,
        SquareRootAnnealing,
        WarmupAnnealing,
        WarmupHoldPolicy,
        WarmupPolicy,
    )
}


def get_all_lr_classes() -> dict[str, type[WarmupPolicy]]:
    """Return all policies by name."""
    return dict(POLICIES)


def get_lr_policy(lr_policy: str, **arguments: object) -> WarmupPolicy:
    """Return a policy by the name of its class.

    Raises:
        ValueError: There is no such policy.
    """
    if lr_policy not in POLICIES:
        raise ValueError(f"there is no policy {lr_policy!r}.{nearest(lr_policy, POLICIES)} The policies are {list(POLICIES)}")
    kind: Callable[..., WarmupPolicy] = POLICIES[lr_policy]
    return kind(**arguments)


def _passed(steps: int, length: int, cycle: bool) -> float:
    """Return the progress of a decay, from 0 to 1."""
    if cycle:
        return steps / (length * (1.0 if steps == 0 else math.ceil(steps / length)))
    return min(steps, length) / length


def _polynomial(initial_lr: float, min_lr: float, passed: float, power: float) -> float:
    return (initial_lr - min_lr) * math.pow(1.0 - passed, power) + min_lr


def _steps(name: str, steps: int | None, ratio: float | None, total: int | None) -> int:
    if steps is not None and ratio is not None:
        raise ValueError(f"expected {name}_steps or {name}_ratio; got both")
    if ratio is None:
        return steps or 0
    if total is None:
        raise ValueError(f"{name}_ratio needs total_steps; got None")
    return int(ratio * total)
