"""Runs for the tests of which= and weights=."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.records import read_records
from cadenza.testing import tiny_loader, tiny_trainer

WORST_FIRST: Any = ("eval/loss", "max")  # the loss falls, so the first evaluation has the highest


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def evaluated(every: str = "2 steps", **options: Any) -> Evaluate:
    return Evaluate(tiny_loader(3), every, **options)


def trained(directory: Path, steps: int = 8, keep_best: Any = WORST_FIRST, callbacks: Any = (), **options: Any) -> Trainer:
    """Return a trainer after a run with an evaluation every 2 steps, and checkpoints of the last two and the best."""
    saves = Checkpoint("3 steps", keep_last=2, keep_best=keep_best)
    arguments = {"model": network(), "callbacks": [Ema(0.5), evaluated(), saves, *callbacks], **options}
    trainer = tiny_trainer(steps=steps, directory=directory, **arguments)
    trainer.fit()
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir() if path.name.startswith("step-"))


def history_of(directory: Path, name: str) -> Iterator[float]:
    return (record.values[name] for record in read_records(directory / "metrics.jsonl") if name in record.values)
