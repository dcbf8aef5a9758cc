"""Cost of saving: the stall of each save, compared with `torch.save`, and the time of trainings that save often.

    python benchmarks/saving.py [--rounds 9] [--saves 4] [--megabytes 100] [--steps 100] [--width 1024]

The first table is about single saves of a model and its AdamW. A save in the background *holds up* the training from the step
boundary until the next batch is fetched, less the median of the same time at steps without a save. A blocking save does so
until the checkpoint has its name, older ones are deleted, and all is flushed. Right after each save, when its thread has
ended, the same state is written to one file by `torch.save`, and again by `torch.save` with `fsync`. A ratio is the median of
the quotients of neighbours; the last column is their first decile. The first save of a run, which takes the memory, has a row
of its own. The second table is about trainings with a checkpoint every 10 steps: the median over rounds of the quotient with
the training of the same round that saves nothing. All rows are interleaved in one process. Every file is flushed to the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.hooks.moments import Callback

BACKGROUND, FIRST, BEST, BLOCKING = "background", "background, first of a run", "background, keep_best", "blocking"
GOALS = {BACKGROUND: "0.33", BLOCKING: "1.50"}


@dataclass
class Save:
    """A save and the neighbouring `torch.save` calls, in seconds."""

    held_up: float
    plain: float
    """Of `torch.save`."""
    flushed: float
    """Of `torch.save` with `fsync`."""


@dataclass
class Neighbours(Callback):
    """Measures how long each save blocks the training, and `torch.save` of the same state right after it."""

    place: Path
    saves: list[Save] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    """At steps without a save."""

    def on_step_end(self, run: Run) -> None:
        self.began = time.perf_counter()

    def on_fetch_start(self, run: Run) -> None:
        if not run.progress.step:
            return
        took = time.perf_counter() - self.began
        if run.progress.step % 2:
            self.idle.append(took)
            return
        for thread in threading.enumerate():
            if thread.name == "cadenza-checkpoint":
                thread.join()
        state = {"model": run.model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in run.optimizers]}
        self.saves.append(Save(took, self._seconds(state, flush=False), self._seconds(state, flush=True)))

    def _seconds(self, state: dict[str, Any], *, flush: bool) -> float:
        begin = time.perf_counter()
        with (self.place / "beside.pt").open("wb") as file:
            torch.save(state, file)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - begin


def trained(place: Path, steps: int, width: int, callbacks: Sequence[Callback]) -> float:
    """Return how long a training takes, its last save included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    batches = [(torch.randn(128, 64), torch.randint(10, (128,))) for _ in range(10)] * 20  # no epoch ends at a save
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


def single_saves(place: Path, saves: int, width: int, *, background: bool, best: bool) -> list[Save]:
    """Return the saves of a run; the time of a save excludes the usual time at a step boundary."""
    (place / "beside").mkdir(parents=True)
    neighbours = Neighbours(place / "beside")
    valid = Evaluate([(torch.randn(2, 64), torch.randint(10, (2,)))], every="2 steps")
    saver = Checkpoint("2 steps", background=background, keep_best=[("eval/loss", "min")] if best else [])
    trained(place / "run", 2 * saves + 1, width, [valid, saver, neighbours] if best else [saver, neighbours])
    idle = statistics.median(neighbours.idle)
    return [Save(save.held_up - idle, save.plain, save.flushed) for save in neighbours.saves]


def first_table(place: Path, rounds: int, saves: int, width: int) -> dict[str, list[Save]]:
    """Measure the single saves, kind by kind in each round."""
    found: dict[str, list[Save]] = {name: [] for name in (BACKGROUND, FIRST, BEST, BLOCKING)}
    for round_ in range(rounds + 1):
        for name in (BACKGROUND, BEST, BLOCKING):
            folder = place / f"single-{round_}-{name}"
            some = single_saves(folder, saves + 1, width, background=name != BLOCKING, best=name == BEST)
            if round_:  # the first warms up
                found[name] += some[1:]
                found[FIRST] += some[:1] if name == BACKGROUND else []
    return found


def second_table(place: Path, rounds: int, steps: int, width: int) -> dict[str, list[float]]:
    """Measure the trainings."""
    taken: dict[str, list[float]] = {"no saving": [], "every 10 steps, background": [], "every 10 steps, blocking": []}
    for round_ in range(rounds + 1):
        for number, name in enumerate(taken):
            callbacks: list[Callback] = [Checkpoint("10 steps", background="background" in name)] if number else []
            took = trained(place / f"whole-{round_}-{number}", steps, width, callbacks)
            if round_:
                taken[name].append(took)
    return taken


def size_in(place: Path, pattern: str) -> float:
    """Return the size of the largest checkpoint, in MB."""
    return max(sum(f.stat().st_size for f in step.iterdir()) for step in place.glob(pattern)) / 1e6


def print_first(found: dict[str, list[Save]]) -> None:
    """Print the table of single saves."""
    print("| a save | compared with | ms | ratio | goal | first decile |")
    print("|---|---|---|---|---|---|")
    for name, saves in found.items():
        against = [save.flushed if name == BLOCKING else save.plain for save in saves]
        ratios = sorted(save.held_up / other for save, other in zip(saves, against, strict=True))
        shown = "`torch.save` + `fsync`" if name == BLOCKING else "`torch.save`"
        ms = 1e3 * statistics.median(save.held_up for save in saves)
        decile = ratios[len(ratios) // 10]
        print(f"| {name} | {shown} | {ms:.0f} | {statistics.median(ratios):.2f} | {GOALS.get(name, '')} | {decile:.2f} |")


def print_second(taken: dict[str, list[float]]) -> None:
    """Print the table of trainings."""
    print("| a training | s | ratio |")
    print("|---|---|---|")
    for name, times in taken.items():
        ratio = statistics.median(took / alone for took, alone in zip(times, taken["no saving"], strict=True))
        print(f"| {name} | {statistics.median(times):.2f} | {ratio:.2f} |")


def main(given: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--saves", type=int, default=4, help="saves in a run of the first table, beside its first one")
    parser.add_argument("--megabytes", type=float, default=100, help="of a checkpoint of the first table")
    parser.add_argument("--steps", type=int, default=100, help="of a training of the second table; 0 leaves it out")
    parser.add_argument("--width", type=int, default=1024, help="of the model of the second table")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    width = int((arguments.megabytes * 1e6 / 12) ** 0.5)  # a number of fp32, and two of AdamW
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found = first_table(place, arguments.rounds, arguments.saves, width)
        size = size_in(place, "single-*/run/checkpoints/step-*")
        print(f"A checkpoint has {size:.1f} MB; {arguments.rounds} rounds of {arguments.saves} saves, one thread.\n")
        print_first(found)
        if arguments.steps:
            taken = second_table(place, arguments.rounds, arguments.steps, arguments.width)
            size = size_in(place, "whole-*/checkpoints/step-*")
            print(f"\nA checkpoint has {size:.1f} MB; {arguments.steps} steps, {arguments.rounds} rounds, one thread.\n")
            print_second(taken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
