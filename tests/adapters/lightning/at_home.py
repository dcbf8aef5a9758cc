"""One small task, trained by Lightning and by a native trainer with the same callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Trainer
from cadenza.callbacks import Evaluate
from cadenza.hooks.moments import BaseCallback
from cadenza.run import Run
from tests.adapters.lightning.home import CPU as ON_CPU
from tests.adapters.lightning.home import by_lightning

CPU: dict[str, Any] = {"driver": "single", **ON_CPU}


def loader(samples: int = 10, seed: int = 0, batch_size: int = 2) -> Any:
    """Return batches of samples of a noisy sum, in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


class Net(pl.LightningModule):
    """A backbone and a head.

    Args:
        norm: Whether the backbone has a BatchNorm layer.
        schedule: Makes a scheduler for Lightning, stepped each epoch.
    """

    def __init__(self, norm: bool = False, schedule: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.schedule = schedule

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.backbone(inputs))
        return outputs

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = mean_error(self, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", mean_error(self, batch))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        outputs: Tensor = self(batch[0])
        return outputs

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


class BreaksAt(Callback):
    """Raises an error after so many batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_fetch_start(self, run: Run) -> None:
        if run.progress.batch == self.batch:
            raise RuntimeError("broken")


def mean_error(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters that are not frozen."""
    return torch.optim.SGD([one for one in parameters if one.requires_grad], 0.05, momentum=0.9, foreach=False)


def at_home(module: Net, callbacks: list[Any], folder: Path, *, valid: bool = True, **arguments: Any) -> pl.Trainer:
    """Train with Lightning; return its trainer."""
    writes = any(isinstance(one, LightningCheckpoint) for one in callbacks)
    settings = {"callbacks": callbacks, "enable_checkpointing": writes, "default_root_dir": folder, "max_epochs": 3}
    return by_lightning(module, loader(), loader(6, 1) if valid else None, **{**settings, **arguments})


def trainer_of(
    module: nn.Module, callbacks: list[Any], *, valid: bool = True, evaluate: str = "1 epoch", **arguments: Any
) -> Trainer:
    """Return a native trainer of the same task."""
    evaluates: list[BaseCallback] = [Evaluate(loader(6, 1), every=evaluate)] if valid else []
    train = arguments.pop("loader", None)
    return Trainer(
        module,
        arguments.pop("optimizer", sgd),
        loader() if train is None else train,
        mean_error,
        callbacks=[*evaluates, *callbacks],
        **{"max_epochs": 3, "seed": 1, **CPU, **arguments},
    )


def natively(module: nn.Module, callbacks: list[Any], **arguments: Any) -> Run:
    """Train with a native trainer; return the run."""
    return trainer_of(module, callbacks, **arguments).fit()


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules hold the same tensors, to the bit."""
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
