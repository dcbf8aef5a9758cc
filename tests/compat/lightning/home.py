"""The same trainings in Lightning's own trainer and in a native one, and a callback that records what it gets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning's own trainer is compared with native ones: pip install lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Evaluate
from cadenza.hooks.moments import BaseCallback

for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}
CPU: dict[str, Any] = {"device": "cpu", "progress": False}
HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
Call = tuple[Any, ...]


class Recorder(pl.Callback):
    """Records each hook, with the counters that it sees and its plain arguments."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def names(self) -> list[str]:
        return [str(call[0]) for call in self.calls]


def _recording(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: Any, pl_module: Any, *values: Any, **keywords: Any) -> None:
        plain = [one for one in (*values, *keywords.values()) if isinstance(one, int | str) and not isinstance(one, bool)]
        where = (trainer.state.fn.value, trainer.state.stage.value if trainer.state.stage else None)
        losses = [one["loss"] for one in values if isinstance(one, dict) and isinstance(one.get("loss"), Tensor)]
        losses += [one.detach() for one in values] if name == "on_before_backward" else []
        seen = [round(float(loss), 5) for loss in losses if name.startswith(("on_train", "on_before"))]
        self.calls.append((name, trainer.current_epoch, trainer.global_step, *where, *plain, *seen))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name))


class Steps(pl.LightningModule):
    """The steps of all stages. Subclasses have a forward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mean_error(self, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mean_error(self, batch)
        self.log("val_loss", loss, batch_size=len(batch[0]))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs: Tensor = self(batch[0])
        return outputs

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class Lit(Steps):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of(0)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs


def model_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def mean_error(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters that are not frozen."""
    return torch.optim.SGD([one for one in parameters if one.requires_grad], 0.05, momentum=0.9, foreach=False)


def batches_of(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def loader_of(count: int, seed: int = 1) -> Any:
    return DataLoader(batches_of(count, seed), batch_size=None)  # type: ignore[arg-type]  # a list will do


def by_lightning(module: pl.LightningModule, *data: Any, **arguments: Any) -> pl.Trainer:
    """Train a module with Lightning's own trainer; return the trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**{**QUIET, **arguments})
        trainer.fit(module, *data)
    return trainer


def at_home(callbacks: list[Any], root: Path, *, batches: int = 3, valid: int = 2, **arguments: Any) -> pl.Trainer:
    """Train the linear model with Lightning's own trainer."""
    validation = loader_of(valid, 2) if valid else None
    return by_lightning(Lit(), loader_of(batches), validation, callbacks=callbacks, default_root_dir=root, **arguments)


def native(callbacks: list[Any], **arguments: Any) -> Run:
    """Train it with a native trainer."""
    return native_trainer(callbacks, **arguments).fit()


def native_trainer(
    callbacks: list[Any], *, batches: int = 3, valid: int = 2, every: Any = "1 epoch", sanity: int = 0, **arguments: Any
) -> Trainer:
    evaluate = [Evaluate(batches_of(valid, 2), every=every, sanity_batches=sanity)] if valid else []
    limits = arguments if "max_steps" in arguments or "max_epochs" in arguments else {"max_epochs": 2, **arguments}
    loss = supervised(nn.functional.mse_loss)
    settings: dict[str, Any] = {"callbacks": [*evaluate, *callbacks], "progress": False, **limits}
    return Trainer(settings.pop("model", None) or model_of(0), sgd, batches_of(batches), loss, **settings)


# -- a backbone and a head --------------------------------------------------------------------------------


def loader(samples: int = 10, seed: int = 0, batch_size: int = 2) -> Any:
    """Return batches of samples of a noisy sum, in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


class Net(Steps):
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


def net_at_home(module: Net, callbacks: list[Any], folder: Path, *, valid: bool = True, **arguments: Any) -> pl.Trainer:
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
        **{"max_epochs": 3, "seed": 1, "driver": "single", **CPU, **arguments},
    )


def natively(module: nn.Module, callbacks: list[Any], **arguments: Any) -> Run:
    """Train with a native trainer; return the run."""
    return trainer_of(module, callbacks, **arguments).fit()


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules hold the same tensors, to the bit."""
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
