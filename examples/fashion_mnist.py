"""Fashion-MNIST: a convolutional network classifies 10 kinds of clothes. Test accuracy about 0.91 after 2 epochs.

    python examples/fashion_mnist.py [--data DIR] [--epochs 2] [--directory runs/fashion] [--quick]

Shows: supervised training with a learning rate schedule, evaluation with torchmetrics, TensorBoard, a run directory.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import Evaluate, LearningRate, Limit, LogTraining
from cadenza.sinks import Console, TensorBoard

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "fashion-mnist"


def main(argv: Sequence[str] | None = None) -> Run:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a convolutional network on Fashion-MNIST.")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the four idx .gz files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="run directory; without it, nothing is written")
    parser.add_argument("--quick", action="store_true", help="run only a few batches, to check that it works")
    options = parser.parse_args(argv)
    if not (options.data / "train-images-idx3-ubyte.gz").exists():
        sys.exit(
            f"Fashion-MNIST is not in {options.data}. Get the four .gz files from the folder data/fashion of "
            "github.com/zalandoresearch/fashion-mnist and pass their folder: --data DIR"
        )

    train = DataLoader(load(options.data, "train"), batch_size=64, shuffle=True)
    test = DataLoader(load(options.data, "t10k"), batch_size=500)
    steps = options.epochs * len(train)
    callbacks = [
        LearningRate(lambda optimizer: OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)),
        LogTraining(every="100 steps"),
        Evaluate(test, metrics={"acc": MulticlassAccuracy(num_classes=10, average="micro")}, sanity_batches=1, name="test"),
        Console(),
    ]
    if options.directory:
        callbacks.append(TensorBoard())
    if options.quick:
        callbacks.append(Limit(train=20, evaluation=2))

    torch.manual_seed(0)  # seeds the initial weights; the trainer's seed is for the training
    trainer = Trainer(
        network(),
        lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.01),
        train,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=options.epochs,
        seed=0,
        directory=options.directory,
        callbacks=callbacks,
    )
    run = trainer.fit()
    print(f"test accuracy {run.history.latest['test/acc']:.4f}")
    return run


def network() -> nn.Module:
    """Images (B, 1, 28, 28) in, logits (B, 10) out."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def load(folder: Path, part: str) -> TensorDataset:
    """Return images (N, 1, 28, 28) in 0..1 and labels (N,)."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def read_idx(file: Path) -> Tensor:
    """Read an idx file: 2 zero bytes, the type (8: uint8), the number of dimensions, each as 4 bytes, then the values."""
    content = gzip.decompress(file.read_bytes())
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


if __name__ == "__main__":
    main()
