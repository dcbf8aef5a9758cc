"""Runs that stop at a step and continue with other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.testing import tiny_trainer

DATA = TensorDataset(torch.arange(24.0).unsqueeze(1), torch.ones(24, 1))


def trainer(directory: Path, steps: int, *callbacks: Callback, **arguments: Any) -> Any:
    """Return a trainer that trains to a step, at which it writes a checkpoint."""
    callbacks = (*callbacks, Checkpoint(f"{steps} steps"))
    return tiny_trainer(callbacks=callbacks, directory=directory, steps=steps, **{"seed": 1, **arguments})


def fit(directory: Path, steps: int, *callbacks: Callback, override: Any = (), **arguments: Any) -> Run:
    """Train to a step; continue what is there."""
    run: Run = trainer(directory, steps, *callbacks, **arguments).fit(resume="auto", override=override)
    return run


def made(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda parameters: kind(parameters, **{"lr": 0.1, **options})


def adamw(**options: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return made(AdamW, **options)


def sgd(rate: float = 0.8) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return made(SGD, lr=rate)


def falling(gamma: float = 0.5) -> LearningRate:
    return LearningRate(lambda optimizer: schedulers.ExponentialLR(optimizer, gamma))


def cosine(steps: int = 8) -> LearningRate:
    return LearningRate(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, steps))


def loader(batch_size: int = 4, samples: int = 24, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*DATA[:samples]), batch_size, **options)


def groups(run: Run) -> list[dict[str, Any]]:
    return [group for optimizer in run.optimizers for group in optimizer.param_groups]


def rate_of(run: Run) -> float:
    return float(groups(run)[0]["lr"])
