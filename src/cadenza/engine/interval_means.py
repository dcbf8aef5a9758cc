"""Means of numbers over the batches since the last record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cadenza.drivers.sharding import is_sharded
from cadenza.engine.loss_check import EVERY, KeptLosses, LossBuffer, StepLoss, weighted_total
from cadenza.records.scalars import as_numbers, host_number, weighted_sum
from cadenza.status.shown import brief
from cadenza.status.tensor_parts import is_array


class IntervalMean:
    """The (weighted) sum of a number over the batches of this rank since the last record, and the sum of the weights.

    Numbers on the host are added in the order of the steps, so a run that resumes inside an interval has the same bits. Those
    on a device stay there, and are added at the record: nothing waits for them.

    Args:
        buffer: Receives the numbers; those of later steps than `step` are added.
        step: The number of complete steps.
    """

    def __init__(self, buffer: LossBuffer, step: int) -> None:
        self._buffer, self._since = buffer, step
        self._total = self._weight = 0.0
        self._added = 0
        buffer.readers.append(self._add_step)

    def add(self, step: int, value: float | Tensor, weight: float | Tensor | None) -> None:
        """Add the number of a batch of this step. A batch without a weight counts as one."""
        value, weight = host_number(value), host_number(weight)
        if not isinstance(value, Tensor) and not isinstance(weight, Tensor):
            self._add(*weighted_total([value], [] if weight is None else [weight]))
            return
        self._buffer.keep(step, [torch.as_tensor(value).detach()], [] if weight is None else [weight])
        self._added += 1
        if not self._added % EVERY:
            self._buffer.send()
        if self._buffer.is_sent:
            self._buffer.deliver(wait=False)

    def sums(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the sum, and the sum of the weights: numbers, or tensors of shape () on the device. Does not wait."""
        total, weight = self._total, self._weight
        away: list[KeptLosses] = []
        for one in self._buffer.kept_since(self._since):
            losses, weights = [*map(host_number, one.losses)], [*map(host_number, one.weights)]
            if any(isinstance(number, Tensor) for number in (*losses, *weights)):
                away.append(one)
            else:
                own, counted = weighted_total(losses, weights)
                total, weight = total + own, weight + counted
        if not away:
            return total, weight
        own_total, own_weight = _sums_on_device(away)
        return own_total + total, own_weight + weight

    def begin(self, step: int) -> None:
        """Begin another interval, after this step."""
        self._since, self._total, self._weight = step, 0.0, 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the sums on the host. Waits for the device."""
        self._buffer.deliver(wait=True)
        return {"total": self._total, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the sums of a checkpoint."""
        self._total, self._weight = state["total"], state["weight"]

    def _add_step(self, one: StepLoss) -> None:
        if one.step > self._since:
            self._add(one.total, one.weight)

    def _add(self, total: float, weight: float) -> None:
        self._total, self._weight = self._total + total, self._weight + weight


def real_number(value: object) -> float | Tensor | None:
    """Return a value if it is a real number or a tensor of shape (); None for all else."""
    if isinstance(value, Tensor):
        whole = type(value) is Tensor or not is_sharded(value)
        return value if not value.ndim and whole and not value.is_complex() else None
    if is_array(value) and not cast("Any", value).ndim:
        value = cast("Any", value).item()
    return value if isinstance(value, int | float) else None


def checked_number(name: str, value: object) -> float | Tensor:
    """Return the output `name`; raise `TypeError` if it has no mean."""
    number = real_number(value)
    if number is None:
        raise TypeError(
            f"LogTraining(outputs=...) takes real numbers and tensors of shape (); got outputs[{name!r}], {brief(value)}. "
            "Return its mean from compute_loss."
        )
    return number


def _sums_on_device(kept: Sequence[KeptLosses]) -> tuple[Tensor, float | Tensor]:
    losses = [loss for one in kept for loss in one.losses]
    like = next((loss for loss in losses if not loss.is_cpu), losses[0])
    # A sum of float32 in float64 is exact, in any order, unless they differ widely. MPS has no float64.
    like = torch.zeros((), dtype=torch.float32 if like.device.type == "mps" else torch.float64, device=like.device)
    numbers = as_numbers(like, losses)
    if not any(one.weights for one in kept):
        return numbers.sum(), len(losses)
    factors = as_numbers(like, [weight for one in kept for weight in one.weights or [1.0] * len(one.losses)])
    return weighted_sum(numbers, factors), factors.sum()
