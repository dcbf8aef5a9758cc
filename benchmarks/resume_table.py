"""Cut runs, continue them, and compare them bit for bit with whole ones, over a table of sources of randomness.

    python benchmarks/resume_table.py [--workers 0 2 4]

In each cell a run of 2 epochs is cut after the last step of the first epoch, after the first step of the second, and in its
middle; `cadenza.testing.prove_resume` compares weights, optimizer, callbacks' states, random streams, batches, moments and
records. Ends with 1 if a cell differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Trainer, supervised
from cadenza.callbacks import Ema, Evaluate, LogTraining
from cadenza.hooks.moments import Callback
from cadenza.testing import prove_resume

SAMPLES, BATCH = 26, 4
AUGMENTATIONS = ("no", "torch", "numpy", "python")
PARTS = ("dropout", "BatchNorm", "EMA", "fp16 scaler", "bf16")
PLACES = ("last step of epoch 1", "first step of epoch 2", "middle of epoch 2")


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points moved by a new random number at each reading."""

    def __init__(self, augmentation: str) -> None:
        self.augmentation = augmentation

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.linspace(0, index / SAMPLES, 4)
        match self.augmentation:
            case "torch":
                point = point + torch.rand(4)
            case "numpy":
                point = point + torch.from_numpy(numpy.random.rand(4)).float()
            case "python":
                point = point + random.random()
        return point, torch.tensor(index % 3)


def trainer(directory: Path, workers: int, augmentation: str, accumulate: int, part: str) -> Trainer:
    """Return the trainer of a cell."""
    torch.manual_seed(3)
    between = {"dropout": nn.Dropout(0.4), "BatchNorm": nn.BatchNorm1d(8)}.get(part, nn.Identity())
    callbacks: list[Callback] = [
        Evaluate(DataLoader(Points(augmentation), batch_size=13)),
        LogTraining("1 step", throughput=False),
    ]
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), between, nn.ReLU(), nn.Linear(8, 3)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(Points(augmentation), batch_size=BATCH, shuffle=True, num_workers=workers),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        accumulate=accumulate,
        precision={"fp16 scaler": "fp16", "bf16": "bf16"}.get(part, "fp32"),
        seed=7,
        directory=directory,
        device="cpu",
        progress=False,
        callbacks=[*callbacks, Ema(0.9)] if part == "EMA" else callbacks,
    )


def cuts(accumulate: int) -> tuple[int, int, int]:
    """Return the steps of `PLACES`."""
    steps = math.ceil(math.ceil(SAMPLES / BATCH) / accumulate)
    return steps, steps + 1, steps + steps // 2 + 1


def failed_cuts(workers: int, augmentation: str, accumulate: int, part: str) -> list[str]:
    """Return the places at which a continued run differs, and in what."""
    make = partial(trainer, workers=workers, augmentation=augmentation, accumulate=accumulate, part=part)
    try:
        prove_resume(make, at=cuts(accumulate), in_process=True)
        return []
    except AssertionError:
        pass
    failed = []
    for place, step in zip(PLACES, cuts(accumulate), strict=True):
        try:
            prove_resume(make, at=[step], in_process=True)
        except AssertionError as error:
            failed.append(f"{place}: {error}")
    return failed


def main() -> int:
    """Fill the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # where there are fewer cores than workers
    begin, differences, cells = time.monotonic(), [], 0
    print("| workers | augmentation | accumulate | " + " | ".join(PARTS) + " |")
    print("|---|---|---|" + "---|" * len(PARTS))
    for workers, augmentation, accumulate in product(arguments.workers, AUGMENTATIONS, (1, 3)):
        row = []
        for part in PARTS:
            failed = failed_cuts(workers, augmentation, accumulate, part)
            differences += [f"{workers}, {augmentation}, {accumulate}, {part}, {difference}" for difference in failed]
            cells += len(PLACES)
            row.append(f"{len(PLACES) - len(failed)} of {len(PLACES)}")
        print(f"| {workers} | {augmentation} | {accumulate} | " + " | ".join(row) + " |", flush=True)
    print(f"\n{cells - len(differences)} of {cells} cells bit-equal, in {time.monotonic() - begin:.0f} s")
    for difference in differences:
        print("differs:", difference)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
