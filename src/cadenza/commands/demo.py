"""``cadenza demo``: a complete training, from data to result, in seconds and without a download."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import MissingExtraError
from cadenza.status.formats import folded

if TYPE_CHECKING:
    from rich.console import Console as Screen

    from cadenza.loading import TensorBatches
    from cadenza.trainer import Trainer

_NEEDED = {"rich": "rich", "tensorboard": "tensorboard", "torchmetrics": "torchmetrics", "sklearn": "scikit-learn"}
_SEED = 0
_EPOCHS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Train a small network on the handwritten digits that come with scikit-learn. Nothing is downloaded."
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where to write; runs/demo-<time> if left out")
    parser.set_defaults(command=lambda arguments: demo(arguments.directory) and None)


def demo(directory: Path | None = None) -> float:
    """Train on scikit-learn's handwritten digits, printing each stage, and return the accuracy on the test set.

    Args:
        directory: Where the run writes; None takes ``runs/demo-<time>``.

    Raises:
        MissingExtraError: A package of the extra ``demo`` is not installed.
        DirectoryError: `directory` cannot be written, or already holds a run.
    """
    for module, package in _NEEDED.items():
        if find_spec(module) is None:
            raise MissingExtraError(package, needed_by="cadenza demo", extra="demo")
    from rich.console import Console as Screen

    from cadenza.records.directory import check_new

    screen = Screen(highlight=False, markup=False, soft_wrap=True)
    directory = directory or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    with _one_thread():
        check_new(directory)  # before any output
        loaders = _digits()
        trainer = _trainer(loaders["train"], loaders["valid"], directory)
        _title(screen, "The plan: all moments of the run, and who listens")
        _show_plan(screen, trainer)
        _title(screen, f"The training: {loaders['train'].samples} images of 8 x 8 pixels")
        trainer.fit()
        results = {name: trainer.evaluate(loader, metrics=_metrics(), name=name) for name, loader in loaders.items()}
    _title(screen, "The result")
    _show_results(screen, loaders, results)
    _title(screen, "What to look at next")
    _show_next(screen, directory)
    return results["test"]["test/acc"]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: as fast as two for such a small network, and much faster on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _digits() -> dict[str, TensorBatches[Any]]:
    """Return loaders for training, validation and test with a fixed split: images (B, 1, 8, 8) in 0..1, labels (B,)."""
    import torch
    from sklearn.datasets import load_digits

    from cadenza.loading import TensorBatches

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    train, valid, test = ((images[part], labels[part]) for part in shuffled.split([1197, 300, 300]))
    return {
        "train": TensorBatches(*train, batch_size=32, shuffle=True),
        "valid": TensorBatches(*valid, batch_size=100),
        "test": TensorBatches(*test, batch_size=100),
    }


def _trainer(train: TensorBatches[Any], valid: TensorBatches[Any], directory: Path) -> Trainer:
    import torch
    from torch import nn

    from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LearningRate, LogTraining
    from cadenza.engine.objective import supervised
    from cadenza.sinks import Console, TensorBoard
    from cadenza.trainer import Trainer

    torch.manual_seed(_SEED)  # the initial weights are drawn here, before the trainer seeds the generators
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * 4 * 4, 10)),
    )
    steps = _EPOCHS * len(train)
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters),
        train,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=_EPOCHS,
        seed=_SEED,
        directory=directory,
        device="cpu",  # a network this small gains nothing on another device
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)),
            LogTraining(every="1 epoch", lr=False, throughput=False),
            Evaluate(valid, metrics=_metrics(), every="1 epoch", name="valid"),
            EarlyStopping("valid/loss", mode="min", patience=4),
            Checkpoint(keep_best=("valid/loss", "min")),
            Console(),
            TensorBoard(),
        ],
    )


def _metrics() -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAccuracy

    return {"acc": MulticlassAccuracy(num_classes=10, average="micro")}


def _title(screen: Screen, text: str) -> None:
    screen.print()
    _say(screen, text, style="bold")


def _say(screen: Screen, line: str, style: str = "") -> None:
    screen.print(folded(line, screen.width) if screen.is_terminal else line, style=style)


def _show_plan(screen: Screen, trainer: Trainer) -> None:
    screen.print(trainer.plan().text(screen.width if screen.is_terminal else None))


def _show_results(screen: Screen, loaders: dict[str, TensorBatches[Any]], results: dict[str, dict[str, float]]) -> None:
    from rich.table import Column, Table

    table = Table("", *(Column(name, justify="right") for name in ("images", "loss", "accuracy")))
    for name, values in results.items():
        row = (str(loaders[name].samples), f"{values[f'{name}/loss']:.4f}", f"{values[f'{name}/acc']:.4f}")
        table.add_row(name, *row, style="bold" if name == "test" else "")
    screen.print(table)


def _show_next(screen: Screen, directory: Path) -> None:
    where = shlex.quote(str(directory))
    _say(screen, f"  curves, in a browser          {_tensorboard()} --logdir {where}")
    _say(screen, f"  records, one JSON line each   {where}/metrics.jsonl")
    _say(screen, f"  settings and outcome          {where}/run.json")
    _say(screen, "  the same for your own model   docs/start.md")


def _tensorboard() -> str:
    """Return the command as it can be typed here; without an activated environment it is not on the PATH."""
    sibling = Path(sys.executable).with_name("tensorboard")
    if shutil.which("tensorboard") or not sibling.exists():
        return "tensorboard"
    return shlex.quote(str(sibling.relative_to(Path.cwd()) if sibling.is_relative_to(Path.cwd()) else sibling))
