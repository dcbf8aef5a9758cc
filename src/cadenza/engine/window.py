"""The accumulation window: the batches of one step, and how much each of them counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import LossError
from cadenza.records.scalars import as_number, weighted_sum, widened


class AccumulationWindow:
    """The batches of one step, and the loss scale of each.

    The gradient of a step is that of the mean loss of its batches or, if batches report a ``weight``, of the weighted mean. The
    number and the weights of the batches are not known when the first gradient is added. So each loss scale assumes a full
    window in which all batches have the weight of the first, and `correction` corrects the gradients at the end.
    """

    __slots__ = (
        *("_first_weight", "_mean_over_ranks", "_scale", "_taken", "_uneven", "applied", "left_out", "losses", "of_ranks"),
        *("mean_weight", "seen", "size", "unreduced", "weights"),
    )

    def __init__(self, size: int, mean_over_ranks: Callable[[Tensor], Tensor] | None = None, *, uneven: bool = False) -> None:
        self.size: int = size
        self._uneven = uneven  # a custom loop may leave out batches on one rank: nothing is exchanged in `add`
        self._mean_over_ranks = mean_over_ranks
        self._scale = 1.0 / size
        self.clear()

    def resize(self, size: int) -> None:
        """Have the next steps hold `size` batches."""
        self.size, self._scale = size, 1.0 / size

    def clear(self) -> None:
        """Start the next step."""
        self.seen: int = 0
        self.unreduced: bool = False
        self.applied: bool = False
        """Whether the weights were updated already."""
        self.left_out: int = 0
        """Batches that do not count, over all ranks: each was left out by one rank alone."""
        self._taken = 0  # batches of this rank: those that count, and those that it left out
        self.losses: list[Tensor] = []
        self.weights: list[float | Tensor] = []
        self._first_weight: float | Tensor | None = None
        self.of_ranks: float | None = None
        """The sum of the weights of all ranks, if it is exchanged with the batches."""
        self.mean_weight: float | Tensor | None = None
        """The sum of the weights, as a mean over ranks, once the gradients are corrected by it."""

    def resume(self, losses: list[Tensor]) -> None:
        """Continue after the batches with these losses, which a checkpoint has counted."""
        self.clear()
        self.losses, self.seen, self._taken = losses, len(losses), len(losses)

    def add(self, loss: Tensor, weight: float | Tensor | None, unit: float | None = None) -> float | Tensor:
        """Add a batch and return its loss scale. The loss is stored without its graph, which would keep activations alive.

        Args:
            loss: The loss of the batch.
            weight: Its weight.
            unit: What loss scales assume as the weight of each batch, the same on all ranks. None: the mean of the first ones.

        Raises:
            LossError: Some batches of the step have a weight, and others have none.
        """
        if self.losses and (weight is None) != (self._first_weight is None):
            raise LossError("either all batches of a step report outputs['weight'], or none does")
        self.losses.append(loss.detach())
        self._taken += 1
        if weight is None:
            return self._scale
        if (on_host := number_on_host(weight)) is not None:
            weight = on_host
        if self._first_weight is None and unit is not None:
            self._first_weight = unit
        elif self._first_weight is None:
            first = weight + (weight == 0)  # a batch of weight 0, such as one of padding only, cannot be the reference
            # The gradients of all ranks are added before they are corrected.
            self._first_weight = 1.0 if self._uneven else self._mean(first, loss)
        self.weights.append(weight)
        return self.scale_of(-1)

    def scale_of(self, index: int) -> float | Tensor:
        """Return the loss scale of a batch that was added."""
        return self._scale if self._first_weight is None else self.weights[index] / (self._first_weight * self.size)

    @property
    def loss_scale(self) -> float | Tensor:
        """The loss scale of the last batch."""
        return self.scale_of(-1) if self.losses else self._scale

    def leave_out(self, loss: Tensor, weight: float | Tensor | None, unit: float | None = None) -> None:
        """Leave out a batch on this rank, which takes part in the exchanges of the others as if its weight were 0."""
        if weight is None:
            self._taken += 1
        else:
            self.add(loss, 0.0, unit)

    def counts(self, ranks: int = 1) -> bool:
        """Return whether a batch of any rank counts."""
        return self.left_out < self._taken * ranks if self.left_out else bool(self.losses)

    @property
    def complete(self) -> bool:
        """Whether the gradients need no correction."""
        return len(self.losses) == self.size and self._first_weight is None and not self.left_out

    @property
    def is_weightless(self) -> bool:
        """Whether no batch of any rank counts, because all weights are 0. Waits for a weight on a device."""
        of_ranks = self.weight_of_ranks
        return bool(self.weights) and float(self.total if of_ranks is None else of_ranks) == 0

    @property
    def weight_of_ranks(self) -> float | Tensor | None:
        """The sum or mean of the weights of all ranks; None if this rank does not know it."""
        return self.of_ranks if self.mean_weight is None else self.mean_weight

    @property
    def total(self) -> float | Tensor:
        """The weights of the batches of this rank, or their number if they have none."""
        return sum(self.weights) if self.weights else len(self.losses)

    def correction(self, ranks: int = 1) -> float | Tensor:
        """Return the factor by which the gradients of an incomplete or weighted window must be multiplied."""
        if self._first_weight is None and self.left_out:
            return self.size * ranks / (self._taken * ranks - self.left_out)
        if self._first_weight is None:
            return self.size / len(self.losses)
        total = self._mean(sum(self.weights), self.losses[0]) if self.of_ranks is None else self.of_ranks / ranks
        self.mean_weight = total
        return self._first_weight * self.size / (total + (total == 0))

    def _mean(self, weight: float | Tensor, like: Tensor) -> float | Tensor:
        """Return the mean of `weight` over all ranks."""
        if self._mean_over_ranks is None:
            return weight
        return self._mean_over_ranks(as_number(weight, like.device, widened(like).dtype))

    def mean_loss(self) -> Tensor | None:
        """Return the (weighted) mean loss of the batches so far, shape (), without graph; None before the first batch."""
        losses, weights = self.losses, self.weights  # read once: a progress bar calls this from another thread
        return mean_loss(losses, weights) if losses else None


def number_on_host(weight: Any) -> float | None:
    """Return a weight as a number; None if there is none, or if it is on a device, which would have to be waited for."""
    return None if weight is None or (isinstance(weight, Tensor) and not weight.is_cpu) else float(weight)


def mean_loss(losses: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the (weighted) mean loss of the batches of a step, at least one, shape (). Does not wait for the device.

    A batch of weight 0 is ignored, even if its loss is NaN. If all weights are 0, the mean is NaN.
    """
    if len(losses) == 1:
        return _nan_if_weightless(losses[0], weights[0]) if weights else losses[0]
    stacked = torch.stack([widened(loss) for loss in losses])
    if not weights:
        return stacked.mean()
    factors = torch.stack([as_number(weight, stacked.device, stacked.dtype) for weight in weights])
    return weighted_sum(stacked, factors) / factors.sum()


def _nan_if_weightless(loss: Tensor, weight: float | Tensor) -> Tensor:
    return torch.where(as_number(weight, loss.device) == 0, math.nan, loss)
