"""The ranks on which the tests of several processes train, and a model that is made for shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cadenza.drivers import DdpDriver, Driver, FsdpDriver, SingleDriver


def single() -> Driver:
    return SingleDriver("cpu")


def ddp(**options: Any) -> DdpDriver:
    return DdpDriver("cpu", timeout_s=100, **options)


def fsdp(**options: Any) -> FsdpDriver:
    return FsdpDriver("cpu", timeout_s=100, **options)


def sharded(**options: Any) -> FsdpDriver:
    return fsdp(**{"shard": Block, **options})


class Block(nn.Module):
    """A layer as models have many of."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        activated: Tensor = self.drop(self.inner(hidden).tanh())
        return activated


def blocks(dropout: float = 0.0) -> nn.Sequential:
    """Return a model of which `sharded` shards two layers on their own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Block(dropout), Block(dropout), nn.Linear(8, 1))
