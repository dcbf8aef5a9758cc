"""CPU time from the trainer to the first batch, and flushes to the disk, compared with a loop by hand. Prints markdown tables.

    python benchmarks/start.py [--rounds 9]

The models have a number of linear layers, of which two are used; the optimizer is AdamW, which Cadenza builds fused. The
median of `rounds` models each. A garbage collection precedes each, so that caches are cold.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint

LOSS = nn.MSELoss()


class Model(nn.Module):
    """Linear layers, of which the first two are used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(count)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the first two."""
        outputs: Tensor = self.layers[1](self.layers[0](inputs))
        return outputs


class Loader:
    """One batch; it notes when it is read."""

    at = 0.0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at = time.process_time()
        yield torch.ones(4, 2), torch.ones(4, 2)


def by_hand(model: nn.Module, loader: Loader) -> None:
    """Train by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()


def trained(model: nn.Module, loader: Loader, directory: Path | None = None) -> None:
    """Train with Cadenza; with a directory, also save."""
    callbacks = [] if directory is None else [Checkpoint("1 epoch")]
    Trainer(
        model, torch.optim.AdamW, loader, supervised(LOSS), max_epochs=1, device="cpu", progress=False, callbacks=callbacks,
        directory=directory,
    ).fit()  # fmt: skip


def first_batch(train: Callable[[nn.Module, Loader], None], layers: int) -> float:
    """Return the milliseconds to the first batch."""
    model, loader = Model(layers), Loader()
    gc.collect()
    began = time.process_time()
    train(model, loader)
    return (loader.at - began) * 1e3


def flushes() -> tuple[int, int]:
    """Return how often a run with a directory and `Checkpoint` flushes before its first step, and after it."""
    times: list[float] = []
    flush, loader = os.fsync, Loader()

    def note(descriptor: int) -> None:
        times.append(time.process_time())
        flush(descriptor)

    os.fsync = note
    try:
        with tempfile.TemporaryDirectory() as folder:
            trained(Model(2), loader, Path(folder, "run"))
    finally:
        os.fsync = flush
    before = sum(at < loader.at for at in times)
    return before, len(times) - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.getLogger("cadenza").setLevel(logging.ERROR)
    print("| tensors | by hand, ms | by hand, again | Cadenza |\n|---|---:|---:|---:|")
    for layers in (2, 500, 5000):
        ways = (by_hand, by_hand, trained)
        times = [[first_batch(train, layers) for train in ways] for _ in range(1 + rounds * (10 if layers < 10 else 1))]
        medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
        print(f"| {2 * layers} | {' | '.join(f'{value:.2f}' for value in medians)} |")
    print("flushes before the first step, and after it:", *flushes())


if __name__ == "__main__":
    main()
