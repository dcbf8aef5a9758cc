"""What is measured: trainings and evaluations, the same for every framework."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
TINY, MIDDLE = ((32, 64, 10), 16), ((784, 512, 512, 10), 64)


class Clock:
    """Counts forward passes, and takes the CPU time at those that are asked for.

    A step is timed from one forward pass to another, as every framework makes them at the same place, whenever it fetches.
    """

    def __init__(self, *wanted: int) -> None:
        self.passes, self.wanted = 0, frozenset(wanted)
        self.at: dict[int, float] = {}

    def tick(self) -> None:
        """Note one forward pass."""
        self.passes += 1
        if self.passes in self.wanted:
            self.at[self.passes] = time.process_time()


class Mlp(nn.Module):
    """Linear layers with ReLU between them, always with the same weights."""

    def __init__(self, widths: tuple[int, ...], clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.clock = clock

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock.tick()
        logits: Tensor = self.layers(inputs)
        return logits


@dataclass(frozen=True)
class Job:
    """One training, or one evaluation, to be done by a framework."""

    model: Mlp
    optimizer: Callable[[Any], torch.optim.Optimizer]
    """Makes one of parameters."""
    batches: list[Batch]
    """Ready ones: loading is not measured."""
    place: Path
    """An empty folder for what is written; also the current one."""
    epochs: int = 1
    accumulate: int = 1
    heard: int = 0
    """Callbacks with an empty `on_step_end`."""
    idle: int = 0
    """Callbacks without hooks."""
    defaults: bool = False
    """Whether nothing is switched off: progress bars, logs, checkpoints."""
    log: bool = False
    """Whether the loss of every step is logged, too."""
    loss_fn: nn.Module = field(default_factory=nn.CrossEntropyLoss)


@dataclass(frozen=True)
class Peer:
    """One row of the tables."""

    train: Callable[[Job], None]
    evaluate: Callable[[Job], float]
    """Returns the mean loss over all samples."""
    without: frozenset[str] = frozenset()
    """Workloads that it has nothing for: a library for loops that are written by hand calls no callbacks."""


def of_loops(train: Callable[[Job], None], evaluate: Callable[[Job], float]) -> Peer:
    """Return the row of a library whose users write the loop themselves."""
    return Peer(train, evaluate, frozenset({"heard_10", "heard_50", "idle_50", "defaults", "log"}))


SGD, ADAMW = partial(torch.optim.SGD, lr=0.01), partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """A column of the tables."""

    title: str
    size: tuple[tuple[int, ...], int] = TINY
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    accumulate: int = 1
    heard: int = 0
    idle: int = 0
    defaults: bool = False
    log: bool = False
    epoch: int | None = None
    """Steps in an epoch; None: all are in one."""
    evaluates: bool = False
    share: float = 1.0
    """Of the steps asked for: fewer where each takes long."""

    def window(self, steps: int) -> tuple[int, int, int]:
        """Return how many steps to do, and the forward passes between which to measure: whole groups and epochs."""
        unit = self.epoch or self.accumulate
        count = max(4, round(steps * self.share / unit)) * unit
        warm_up = max(unit, count // 10 // unit * unit)
        return count, warm_up + 1, count - unit + 1

    def job(self, steps: int, place: Path) -> Job:
        """Return a fresh one; the same again at each call."""
        count, first, last = self.window(steps)
        (widths, size), each = self.size, self.epoch or count
        model = Mlp(widths, Clock(1, first, last))
        batches = [(torch.randn(size, widths[0]), torch.randint(widths[-1], (size,))) for _ in range(each)]
        same = {name: getattr(self, name) for name in ("optimizer", "accumulate", "heard", "idle", "defaults", "log")}
        return Job(model, batches=batches, place=place, epochs=count // each, **same)


WORKLOADS = {
    "sgd": Workload("tiny step, SGD"),
    "adamw": Workload("tiny step, AdamW", optimizer=ADAMW),
    "accumulate_4": Workload("accumulation of 4, a batch", accumulate=4),
    "defaults": Workload("defaults", defaults=True),
    "log": Workload("defaults, each loss logged", defaults=True, log=True),
    "middle": Workload("step of 5 to 10 ms, AdamW", size=MIDDLE, optimizer=ADAMW, share=0.125),
    "evaluation": Workload("evaluation, a batch", evaluates=True),
    "epochs_of_10": Workload("epochs of 10 steps, a step", epoch=10),
    "heard_10": Workload("10 callbacks with a hook per step", heard=10),
    "heard_50": Workload("50 callbacks with a hook per step", heard=50),
    "idle_50": Workload("50 callbacks without hooks", idle=50),
}
