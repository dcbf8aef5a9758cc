"""A LightningModule in the trainer of Lightning and in a native one, from the same weights and the same data."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Run, Trainer
from tests.compat.lightning.home import CPU, by_lightning

lightning: Any = import_module("lightning")


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
    by_lightning(module, *(loader if isinstance(loader, tuple) else [loader]), **arguments)
    return module


def native(make: Callable[[], Any], loader: Any, **arguments: Any) -> Any:
    """Train a module with Cadenza, and return it."""
    return native_run(make, loader, **arguments)[0]


def native_run(make: Callable[[], Any], loader: Any, resume: Any = False, **arguments: Any) -> tuple[Any, Run]:
    """Train a module with Cadenza; return it, and the run."""
    torch.manual_seed(1)
    module = make()
    trainer = Trainer.from_lightning(module, loader, **{**CPU, **arguments})
    return module, trainer.fit(resume=resume)


def trained_alike(
    make: Callable[[], Any],
    data: Any = None,
    *,
    home: dict[str, Any] | None = None,
    here: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[Any, Any, Run]:
    """Train a module with Lightning and with Cadenza, to the same losses and weights; return the two modules, and the run."""
    loader = batches() if data is None else data
    theirs = at_home(make, loader, **both, **(home or {}))
    ours, run = native_run(make, loader, **both, **(here or {}))
    assert ours.losses == theirs.losses
    assert torch.equal(weights(ours), weights(theirs))
    return theirs, ours, run


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
