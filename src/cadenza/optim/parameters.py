"""The parameters of optimizers, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield every parameter that the optimizers update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def distinct_gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients of all parameters of the optimizers, without duplicates in the same memory.

    Two optimizers may hold one parameter, and two parameters may share one gradient.
    """
    found: dict[Any, Tensor] = {}
    for parameter in parameters_of(optimizers):
        gradient = parameter.grad
        if gradient is not None:
            dense = type(gradient) is Tensor and gradient.layout is torch.strided
            found[(gradient.data_ptr(), gradient.shape) if dense else id(gradient)] = gradient
    return list(found.values())
