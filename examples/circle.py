"""A training that survives kills: is a point inside the circle? Start it, kill it, and start the same command again.

    python examples/circle.py [--directory runs/circle] [--epochs 12] [--quick]

Shows: checkpoints within an epoch, `fit(resume="auto")`, and the hash of the weights at the end, which equals that of an
    uninterrupted training. A step takes 20 milliseconds on purpose.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Limit
from cadenza.loading import TensorBatches
from cadenza.sinks import Console


def main(argv: Sequence[str] | None = None) -> Run:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a network that goes on where it was killed.")
    parser.add_argument("--directory", type=Path, default=Path("runs/circle"), help="run directory, with the checkpoints")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="run only a few batches, to check that it works")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # more threads do not help such a small network
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) < 1).long()
    trainer = Trainer(
        lambda: nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        TensorBatches(points, inside, batch_size=32, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=options.epochs,
        seed=1,
        device="cpu",
        directory=options.directory,
        callbacks=[Checkpoint("10 steps", keep_last=2), Console(), slowly, *([Limit(train=5)] if options.quick else [])],
    )
    run = trainer.fit(resume="auto")
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    print("sha256 of the weights:", hashlib.sha256(weights).hexdigest()[:32])
    return run


@on(Callback.on_step_end)
def slowly(run: Run) -> None:
    """Leave time to kill the process."""
    time.sleep(0.02)


if __name__ == "__main__":
    main()
