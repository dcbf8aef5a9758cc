"""What saving costs: training time with a checkpoint every 10 steps, in the background and blocking, beside none at all.

    python benchmarks/saving.py [--rounds 9] [--steps 100] [--width 1024]

The three trainings are interleaved in one process, round by round; a ratio is the median over rounds of the quotient with the
training of the same round that saves nothing. Every file is fsynced, so the disk counts as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint
from cadenza.hooks.moments import Callback


def seconds(place: Path, steps: int, width: int, callbacks: list[Callback]) -> float:
    """Return how long a training takes, its last save included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    batches = [(torch.randn(128, 64), torch.randint(10, (128,))) for _ in range(10)]
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batches,
        supervised(nn.CrossEntropyLoss()),
        max_steps=steps,
        seed=1,
        directory=place,
        device="cpu",
        progress=False,
        callbacks=callbacks,
    )
    begin = time.perf_counter()
    trainer.fit()
    return time.perf_counter() - begin


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {"no saving": [], "every 10 steps, background": [], "every 10 steps, blocking": []}
    with tempfile.TemporaryDirectory() as place:
        for round_ in range(arguments.rounds + 1):
            for number, name in enumerate(taken):
                callbacks: list[Callback] = [Checkpoint("10 steps", background="background" in name)] if number else []
                took = seconds(Path(place, f"{round_}-{number}"), arguments.steps, arguments.width, callbacks)
                if round_:  # the first warms up
                    taken[name].append(took)
        size = max(sum(f.stat().st_size for f in step.iterdir()) for step in Path(place).glob("*/checkpoints/step-*"))
    print(f"A checkpoint has {size / 1e6:.1f} MB; {arguments.steps} steps, {arguments.rounds} rounds, one thread.\n")
    print("| | s | ratio |")
    print("|---|---|---|")
    for name, times in taken.items():
        ratio = statistics.median(took / alone for took, alone in zip(times, taken["no saving"], strict=True))
        print(f"| {name} | {statistics.median(times):.2f} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
