"""Train in a container that may be stopped at any time: ``python train.py DIRECTORY [EPOCHS]``."""

from __future__ import annotations

import sys

import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.loading import TensorBatches
from cadenza.sinks import Console


def main() -> None:
    """Train until the end, or until a signal."""
    directory, epochs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) < 1).long()
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        TensorBatches(points[:800], inside[:800], batch_size=32, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=epochs,
        seed=1,
        directory=directory,
        callbacks=[
            Evaluate(TensorBatches(points[800:], inside[800:], batch_size=100)),
            Checkpoint("500 steps"),
            Console(),
        ],
    )
    run = trainer.fit(resume="auto")
    print(run.outcome)


if __name__ == "__main__":
    main()
