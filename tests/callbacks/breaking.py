"""A module that breaks in its backward pass, for the tests of `Capsule` and `Recover`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Root(nn.Module):
    """Roots of scaled numbers. The gradient of the root at 0 is infinite, and times 0 it is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.scale).clamp(min=0).sqrt()


def batches(count: int, broken: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of one number, of which one has a gradient of `Root` that is NaN."""
    return [(torch.full((2, 1), 0.0 if number == broken else 1.0), torch.ones(2, 1)) for number in range(count)]
