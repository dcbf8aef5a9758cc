"""What the tests of several processes train."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer
from cadenza.drivers import DdpDriver, Driver, SingleDriver

Batch = tuple[Tensor, ...]


def samples(count: int) -> TensorDataset:
    """Return samples ``(inputs, target, number)``: shapes (3,), (1,), ()."""
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2, torch.arange(count))


def loader(count: int = 24, batch_size: int = 4, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size, shuffle=shuffle, **options)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def judged(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return loss, predictions and targets, for an evaluation."""
    return {"loss": squared_error(model, batch), "predictions": model(batch[0]), "targets": batch[1]}


def own_rank() -> int:
    """Return which of the launched processes this is."""
    return int(os.environ["RANK"])


def rank() -> int | None:
    """Return which of the launched processes this is; None outside of `launch`."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def driver() -> Driver:
    """Return DDP on the CPU inside of `launch`, and one process outside."""
    return DdpDriver("cpu", timeout_s=100) if "RANK" in os.environ else SingleDriver("cpu")


def trainer(data: Iterable[Any] | None = None, **arguments: Any) -> Trainer:
    arguments.setdefault("compute_loss", squared_error)
    arguments.setdefault("max_epochs", 2)
    model = arguments.pop("model", None)
    return Trainer(
        network() if model is None else model,
        arguments.pop("optimizer", momentum),
        loader() if data is None else data,
        driver=arguments.pop("driver", None) or driver(),
        seed=arguments.pop("seed", 5),
        **{"progress": False, **arguments},
    )


def weights_of(one: Trainer) -> Tensor:
    """Return all weights as one vector."""
    return torch.cat([weight.detach().flatten() for weight in one.model.parameters()])
