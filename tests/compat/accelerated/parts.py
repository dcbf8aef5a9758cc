"""A small task, a trainer that records its hooks, and a callback that records its events."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.accelerated.events import EVENTS
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.hooks.moments import BaseCallback
from cadenza.run import Run
from cadenza.testing import launch

T = TypeVar("T")
HERE = {"num_workers": 0}  # loaders in this process


def data(batches: int, batch_size: int = 2) -> TensorDataset:
    """Return ``y = 2x + 1``."""
    inputs = torch.linspace(-1, 1, batches * batch_size).unsqueeze(1)
    return TensorDataset(inputs, 2 * inputs + 1)


def model() -> nn.Linear:
    linear = nn.Linear(1, 1)
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias.fill_(0.0)
    return linear


class Scripted(Dataset[tuple[Tensor, Tensor]]):
    """Samples with losses as targets; a `ScriptedTrainer` reports them."""

    def __init__(self, *losses: float) -> None:
        self.losses = losses

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.tensor(self.losses[index])

    def __len__(self) -> int:
        return len(self.losses)


class Dropping(nn.Module):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class ScriptedTrainer(Trainer):
    """The loss is the target of the batch. Weights get no gradient."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch[0])
        return {"loss": outputs.sum() * 0 + batch[1].mean(), "model_outputs": outputs, "batch_size": len(batch[1])}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return self.calculate_train_batch_loss(batch)


class Noting(TrainerCallback):
    """Records every event: its name, its keyword arguments, and the current epoch."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log: list[str] = [] if log is None else log
        self.seen: list[tuple[str, dict[str, Any], int]] = []

    def note(self, name: str, trainer: Any, keywords: dict[str, Any]) -> None:
        self.log.append(name)
        self.seen.append((name, keywords, trainer.run_history.current_epoch))

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the keyword arguments of each call of an event."""
        return [keywords for seen, keywords, _ in self.seen if seen == name]


def _noting(name: str) -> Callable[..., None]:
    def event(self: Noting, trainer: Any, **keywords: Any) -> None:
        self.note(name, trainer, keywords)

    return event


for _name in EVENTS:
    setattr(Noting, _name, _noting(_name))


class Again(Noting):
    """A second one, because a list may hold one callback of each class."""


class Hooks(TrainerCallback):
    """Calls functions at events: ``Hooks(on_train_epoch_end=lambda trainer, **_: ...)``."""

    def __init__(self, **functions: Callable[..., object]) -> None:
        for event, function in functions.items():
            setattr(self, event, function)


class Rates(TrainerCallback):
    """Records the learning rate of each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen.append(round(trainer.optimizer.param_groups[0]["lr"], 9))


HOOKS = (
    *("create_train_dataloader", "create_eval_dataloader", "create_scheduler", "training_run_start", "train_epoch_start"),
    *("calculate_train_batch_loss", "backward_step", "optimizer_step", "scheduler_step", "optimizer_zero_grad"),
    *("train_epoch_end", "eval_epoch_start", "calculate_eval_batch_loss", "eval_epoch_end", "training_run_epoch_end"),
    *("training_run_end", "evaluation_run_start", "evaluation_run_end"),
)


class NotingTrainer(Trainer):
    """Records every hook, with its name in brackets."""

    log: list[str]


def _hook(name: str) -> Callable[..., Any]:
    def hook(self: NotingTrainer, *arguments: Any) -> Any:
        self.log.append(f"[{name}]")
        return getattr(Trainer, name)(self, *arguments)

    return hook


for _name in HOOKS:
    setattr(NotingTrainer, _name, _hook(_name))


def noting_trainer(*callbacks: BaseCallback | type[BaseCallback], lr: float = 0.1) -> tuple[NotingTrainer, Noting]:
    """Return a trainer and a callback that record into one list."""
    noting, linear = Noting(), model()
    NotingTrainer.log = noting.log
    optimizer = torch.optim.SGD(linear.parameters(), lr=lr)
    return NotingTrainer(linear, nn.MSELoss(), optimizer, callbacks=[noting, *callbacks]), noting


def trainer_of(kind: type[Trainer] = Trainer, callbacks: Iterable[Any] = (), lr: float = 0.1) -> Trainer:
    """Return a trainer of a two-weight model."""
    linear = model()
    return kind(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=lr), callbacks=tuple(callbacks))


def train(trainer: Trainer, epochs: int, train_data: Any, eval_data: Any = None, batch_size: int = 2, **more: Any) -> Trainer:
    """Train with loaders in this process, without shuffling; return the trainer."""
    for kind in ("train", "eval"):
        more.setdefault(f"{kind}_dataloader_kwargs", {**HERE, "shuffle": False})
    trainer.train(train_data, epochs, eval_data, per_device_batch_size=batch_size, **more)
    return trainer


def run_of(trainer: Trainer) -> Run:
    """Return the native run of a training."""
    assert trainer.native_run is not None
    return trainer.native_run


def config_of(trainer: Trainer) -> TrainerRunConfig:
    assert trainer.run_config is not None
    return trainer.run_config


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.get_model().state_dict().values()])


def metrics_of(trainer: Trainer) -> dict[str, list[Any]]:
    history = trainer.run_history
    return {name: history.get_metric_values(name) for name in history.get_metric_names()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on_two(function: Callable[[], T]) -> list[T]:
    """Call a function in two processes without GPUs; return both results."""

    def one() -> T:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        warnings.filterwarnings("ignore", "The last batch", UserWarning)  # of an uneven evaluation
        return function()

    return launch(one)
