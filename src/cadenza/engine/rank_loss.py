"""The mean loss of a step over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cadenza.drivers.base import Driver
from cadenza.engine.step_state import StepState
from cadenza.engine.window import AccumulationWindow, number_on_host
from cadenza.records.scalars import as_number, weighted_sum, widened


def mean_over_ranks(window: AccumulationWindow, driver: Driver, *, uneven: bool) -> Tensor | None:
    """Return the (weighted) mean loss of a step over all ranks; None if there is none, NaN if all weights are 0.

    Every rank must call this.

    Args:
        window: The batches of this rank.
        driver: Reduces over the ranks.
        uneven: Whether ranks may have different numbers of batches.
    """
    own = window.mean_loss()
    differ = uneven or window.left_out > 0
    if driver.world_size == 1 or (own is None and not differ):
        return own
    if not uneven and not window.counts(driver.data_world_size):
        return None
    if own is not None and is_number(window, uneven=uneven):
        return driver.reduce(own.double(), "sum") / driver.data_world_size
    own = torch.zeros((), device=driver.device) if own is None else widened(own)
    weight = as_number(window.total if window.weights or differ else 1.0, own.device, own.dtype)
    total = driver.reduce(torch.stack([weighted_sum(own, weight), weight]), "sum")
    return total[0] / total[1]


def mean_on_its_way(step: StepState, weight: Any, driver: Driver) -> Callable[[], Tensor | None] | None:
    """Start the exchange of `mean_over_ranks` before the backward pass of the last batch of a step. Every rank must call this.

    Args:
        step: The step, with the batches before this one in its window.
        weight: The weight of the batch.
        driver: Reduces over the ranks.

    Returns:
        A function that waits for the mean; None if the window is not full or its numbers are on a device, on all ranks.
    """
    window, loss = step.window, dict.get(step.outputs, "loss")
    if window.seen < window.size or not isinstance(loss, Tensor) or loss.numel() != 1:  # no number: an error of this rank
        return None
    loss = loss.detach()
    weights = [*window.weights, *([] if weight is None else [0.0 if step.dropped else weight])]
    losses = [*window.losses, *([] if step.dropped and weight is None else [loss])]
    on_host = [number for one in (*losses, *weights) if (number := number_on_host(one)) is not None]
    if not loss.is_cpu or len(on_host) < len(losses) + len(weights):
        return None
    factors = on_host[len(losses) :] if weights else [1.0] * len(losses)
    terms = [value * factor for value, factor in zip(on_host, factors, strict=False) if factor]
    arrives = driver.reduce_later(torch.tensor([sum(terms), sum(factors)], dtype=torch.float64) * driver.counts)

    def mean() -> Tensor | None:
        total, count = arrives()
        return total / count if weights or count else None

    return mean


def is_number(window: AccumulationWindow, *, uneven: bool) -> bool:
    """Return whether `mean_over_ranks` is the mean of the losses of all ranks as a record reduces it. All ranks agree.

    A record that holds the loss of this rank then saves an exchange. A sum of float32 in float64 is exact, in any order, unless
    they differ by a factor of 2^29 / ranks or more: so the bits are the same in a record and in a replay.
    """
    own = window.mean_loss()
    is_mean = not uneven and not window.left_out and not window.weights
    return is_mean and own is not None and own.is_cpu and own.dtype is not torch.float64
