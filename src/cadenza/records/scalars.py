"""Tensors of shape (): conversions and weighted sums that do not wait for the device."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of `losses` times `weights`, of the same shape, as shape (). A loss of weight 0 may be NaN."""
    return torch.where(weights == 0, 0.0, losses * weights).sum()


def widened(value: Tensor) -> Tensor:
    """Return a real tensor as float32, or unchanged if it is float64, so that sums lose no precision."""
    return value if value.dtype is torch.float64 else value.float()


def as_number(value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a `dtype` of shape () on `device`. A number is filled in there: a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype)
    return torch.full((), float(value), dtype=dtype, device=device)


def as_numbers(like: Tensor, values: list[Any]) -> Tensor:
    """Return numbers and tensors of shape () as one tensor of shape (N,), with the dtype and the device of `like`."""
    if like.is_cpu and values:  # four times as fast as torch.tensor
        return torch.frombuffer(array("d", values), dtype=torch.float64).to(like.dtype)
    if any(issubclass(kind, Tensor) for kind in set(map(type, values))):
        return torch.stack([as_number(value, like.device, like.dtype) for value in values])
    return torch.tensor(values, dtype=like.dtype, device=like.device)
