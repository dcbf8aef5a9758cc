"""The mean loss of a step over several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from cadenza.drivers.base import Driver
from cadenza.engine.window import AccumulationWindow
from cadenza.records.scalars import as_number, quotient, widened


def mean_over_ranks(window: AccumulationWindow, driver: Driver, *, by_hand: bool) -> Tensor | None:
    """Return the (weighted) mean loss of a step over all ranks; None if there is none. Every rank must call this.

    Args:
        window: The batches of this rank.
        driver: Reduces over the ranks.
        by_hand: Whether ranks may have different numbers of batches.
    """
    own = window.mean_loss()
    uneven = by_hand or window.left_out > 0
    if driver.world_size == 1 or (own is None and not uneven):
        return own
    if not by_hand and not window.counts(driver.data_world_size):
        return None
    if own is not None and is_number(window, by_hand=by_hand):
        return driver.reduce(own.double(), "sum") / driver.data_world_size
    own = torch.zeros((), device=driver.device) if own is None else widened(own)
    weight = as_number(window.total if window.weights or uneven else 1.0, own.device, own.dtype)
    total = driver.reduce(torch.stack([own * weight, weight]), "sum")
    return quotient(total[0], total[1])


def is_number(window: AccumulationWindow, *, by_hand: bool) -> bool:
    """Return whether `mean_over_ranks` is the mean of the losses of all ranks as a record reduces it. All ranks agree.

    A record that holds the loss of this rank then saves an exchange. A sum of float32 in float64 is exact, in any order, unless
    they differ by a factor of 2^29 / ranks or more: so the bits are the same in a record and in a replay.
    """
    own = window.mean_loss()
    is_mean = not by_hand and not window.left_out and not window.weights
    return is_mean and own is not None and own.is_cpu and own.dtype is not torch.float64
