"""The run that the tests repeat: shuffled, augmented, with dropout, accumulation, averaged weights and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LearningRate, LogTraining
from cadenza.testing import tiny_loader


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn anew each time: an augmentation."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([index / 15 - 1])
        return value + 0.1 * torch.randn(1), 2 * value + 1


def trainer(directory: Path, *, steps: int = 80, saves: str = "10 steps", more: Any = (), **arguments: Any) -> Trainer:
    """Return the trainer. Two of its calls make equal runs."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    usual: dict[str, Any] = {"loader": DataLoader(Noisy(), batch_size=4, shuffle=True), "accumulate": 2, "seed": 3}
    usual |= {"device": "cpu", "driver": "single"} if "driver" not in arguments else {}
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        compute_loss=supervised(nn.MSELoss()),
        max_steps=steps,
        directory=directory,
        progress=False,
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)),
            Ema(decay=0.9),
            Evaluate(tiny_loader(), weights="ema", every="7 steps"),
            LogTraining("1 step"),
            Checkpoint(saves, keep_last=None, background=False),
            *more,
        ],
        **{**usual, **arguments},
    )
