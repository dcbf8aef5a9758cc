"""How `Recover` heals runs: planted bad batches, clean runs, and a comparison of their losses.

    python benchmarks/recover.py [--runs 50]

Each run with a planted sample has a different seed and sample, and one of four faults in turn: a target that is NaN,
an input that is infinite, a target 10,000 times and one 100 times too large. The command prints how many runs left out exactly
the batch with this sample, how far their loss on held-out data is from that of the clean run with the same seed, and how many
clean runs went back.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, LearningRate, Recover

SAMPLES, BATCH = 2048, 16
FAULTS: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
    lambda inputs, target: (inputs, target * math.nan),
    lambda inputs, target: (inputs * math.inf, target),
    lambda inputs, target: (inputs, target * 1e4 + 1e4),
    lambda inputs, target: (inputs, target * 100 + 100),
]


def samples(seed: int, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return samples of a function with noise: inputs (count, 4), targets (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    noise = torch.randn(count, 1, generator=generator)
    return inputs, torch.sin(inputs).sum(1, keepdim=True) + noise


def trained(seed: int, fault: int | None, directory: Path) -> tuple[float, list[list[int]], int, int]:
    """Train. Return the loss on other data, the batches that were left out, the number of rollbacks, and the bad sample."""
    inputs, targets = samples(seed)
    bad = int(torch.randint(SAMPLES, (), generator=torch.Generator().manual_seed(seed)))
    if fault is not None:
        inputs[bad], targets[bad] = FAULTS[fault % len(FAULTS)](inputs[bad], targets[bad])
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    run = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        DataLoader(TensorDataset(inputs, targets), BATCH, shuffle=True),
        supervised(nn.MSELoss()),
        max_epochs=1,
        seed=seed,
        directory=directory,
        callbacks=[
            Recover(),
            LearningRate(lambda optimizer: CosineAnnealingLR(optimizer, SAMPLES // BATCH)),
            Checkpoint("25 steps", keep_last=2),
        ],
        device="cpu",
        progress=False,
    ).fit()
    decisions = [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]
    out = [decision["data"]["samples"][0] for decision in decisions if decision["what"] == "batch left out"]
    with torch.no_grad():
        other, expected = samples(10_000 + seed, 4096)
        loss = float(nn.functional.mse_loss(run.model(other), expected))
    return loss, out, sum(decision["what"] == "went back" for decision in decisions), bad


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    healed = rolled = 0
    apart: list[float] = []
    for seed in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            clean, none_out, back, _ = trained(seed, None, Path(folder, "clean"))
            rolled += bool(back or none_out)
            loss, out, times, bad = trained(seed, seed, Path(folder, "bad"))
        apart.append(loss / clean - 1)
        exact = len(out) == 1 and bad in out[0] and times == 1
        healed += exact
        if not exact:
            print(f"seed {seed}: {len(out)} batches left out, {times} rollbacks")
    print(f"{healed} of {given.runs} runs left out exactly the planted batch, with one rollback")
    print(f"their losses are apart from those of clean runs by at most {max(map(abs, apart)):.2%}")
    print(f"{rolled} of {given.runs} clean runs went back")


if __name__ == "__main__":
    main()
