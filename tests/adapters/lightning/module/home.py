"""A LightningModule in the trainer of Lightning and in a native one, from the same weights and the same data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Run, Trainer

lightning: Any = pytest.importorskip("lightning", reason="lightning is not installed")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def rows(count: int = 40, width: int = 4, seed: int = 0) -> TensorDataset:
    """Return a data set for regression."""
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, width, generator=draw), torch.randn(count, 1, generator=draw))


def batches(count: int = 40, size: int = 4) -> DataLoader[Any]:
    return DataLoader(rows(count), size)


def at_home(make: Callable[[], Any], loader: Any, **arguments: Any) -> Any:
    """Train a module with Lightning, and return it."""
    torch.manual_seed(1)
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(**{**QUIET, **arguments}).fit(module, loader)
    return module


def native(make: Callable[[], Any], loader: Any, **arguments: Any) -> Any:
    """Train a module with Cadenza, and return it."""
    return native_run(make, loader, **arguments)[0]


def native_run(make: Callable[[], Any], loader: Any, resume: Any = False, **arguments: Any) -> tuple[Any, Run]:
    """Train a module with Cadenza; return it, and the run."""
    torch.manual_seed(1)
    module = make()
    trainer = Trainer.from_lightning(module, loader, **{"device": "cpu", "progress": False, **arguments})
    return module, trainer.fit(resume=resume)


def weights(module: nn.Module) -> torch.Tensor:
    """Return all weights in one tensor."""
    return torch.cat([one.detach().flatten() for one in module.parameters()])


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """Two layers, with the losses of the training kept. Subclasses configure the optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        self.rates += [group["lr"] for group in self.trainer.optimizers[0].param_groups if "lr" in group]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def sgd(module: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), rate, momentum=0.9)


def configured(make: Callable[[Any], Any], base: type[Any] = Regression) -> Callable[[], Any]:
    """Return a class of modules with these optimizers."""
    return type("Configured", (base,), {"configure_optimizers": make})
