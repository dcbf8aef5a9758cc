"""The measured trainings and evaluations, the same for every framework."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]
TINY, MIDDLE = ((32, 64, 10), 16), ((784, 512, 512, 10), 64)


class Clock:
    """Counts forward passes, and notes the CPU time at each `each` of them, after which the other loop has its turn.

    A step is timed from one forward pass to another, as every framework makes them at the same place, whenever it fetches.
    """

    def __init__(self, each: int) -> None:
        self.passes, self.each = 0, each
        self.now: Callable[[], float] = time.process_time
        self.turn_over: Callable[[], None] = _go_on
        self.first_s = 0.0
        """The CPU time at the first forward pass."""
        self.at: list[float] = []
        """The CPU time at the end of each turn."""
        self.begun: list[float] = []
        """The CPU time at the beginning of each turn, without the first."""

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # an average of the model is a copy of it

    def tick(self) -> None:
        """Note one forward pass."""
        self.passes += 1
        if self.passes == 1:
            self.first_s = self.now()
        elif self.passes % self.each == 0:
            self.at.append(self.now())
            self.turn_over()
            self.begun.append(self.now())


def _go_on() -> None:
    """Continue; there is no other loop."""


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
    """A training or an evaluation to run with a framework."""

    model: Mlp
    optimizer: Callable[[Any], torch.optim.Optimizer]
    """Creates the optimizer from parameters."""
    batches: Any
    """Ready ones in a list: loading is not measured. Else an iterable of them, or a `DataLoader`."""
    place: Path
    """An empty folder for output; also the working directory."""
    epochs: int = 1
    accumulate: int = 1
    heard: int = 0
    """Callbacks with an empty `on_step_end`."""
    idle: int = 0
    """Callbacks without hooks."""
    defaults: bool = False
    """Whether defaults stay on: progress bars, logs, checkpoints."""
    log: bool = False
    """Whether the loss of every step is logged, too."""
    typical: bool = False
    """Whether it has the set-up of `Workload.typical`."""
    loss_fn: nn.Module = field(default_factory=nn.CrossEntropyLoss)


@dataclass(frozen=True)
class Peer:
    """One row of the tables."""

    train: Callable[[Job], None]
    evaluate: Callable[[Job], float]
    """Returns the mean loss over all samples."""
    without: frozenset[str] = frozenset()
    """Unsupported workloads: a library for hand-written loops has no callbacks."""


def of_loops(train: Callable[[Job], None], evaluate: Callable[[Job], float]) -> Peer:
    """Return the row of a library whose users write the loop themselves."""
    return Peer(train, evaluate, CALLBACKS)


CALLBACKS = frozenset({"heard_10", "heard_50", "idle_50", "defaults", "log"})
"""The workloads that have callbacks."""
TYPICAL = frozenset({"typical", "typical_middle"})
ADAMW_ONLY = TYPICAL | {"adamw", "middle"}
"""The workloads in which an optimizer may be fused."""


class Source:
    """An iterable of batches that is not a list."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


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
    iterable: bool = False
    """Whether the batches come from an iterable that is not a list."""
    typical: bool = False
    """Whether it has the usual set-up: a shuffled `DataLoader`, AdamW, gradients of norm 1 at most, a moving average of the
    weights, a cosine schedule, the loss logged each 50 steps, and a progress bar."""
    share: float = 1.0
    """The fraction of the requested steps to run; smaller for slow steps."""
    turn: int = 20
    """Forward passes between two turns."""

    def count(self, steps: int) -> int:
        """Return how many forward passes a run has: whole turns and epochs."""
        unit = math.lcm(self.epoch or 1, self.accumulate, self.turn)
        return max(4, round(steps * self.share / unit)) * unit

    def job(self, steps: int, place: Path) -> Job:
        """Return a new instance, equal at each call."""
        count = self.count(steps)
        (widths, size), each = self.size, self.epoch or count
        model = Mlp(widths, Clock(self.turn))
        batches: Any = [(torch.randn(size, widths[0]), torch.randint(widths[-1], (size,))) for _ in range(each)]
        if self.iterable:
            batches = Source(batches)
        elif self.typical:
            samples = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
            batches = DataLoader(samples, size, shuffle=True, generator=torch.Generator().manual_seed(0))
        names = ("optimizer", "accumulate", "heard", "idle", "defaults", "log", "typical")
        same = {name: getattr(self, name) for name in names}
        return Job(model, batches=batches, place=place, epochs=count // each, **same)


WORKLOADS = {
    "typical": Workload("tiny step", optimizer=ADAMW, typical=True),
    "typical_middle": Workload("step of 5 to 10 ms", size=MIDDLE, optimizer=ADAMW, typical=True, share=0.25, turn=5),
    "sgd": Workload("tiny step, SGD"),
    "adamw": Workload("tiny step, AdamW", optimizer=ADAMW),
    "accumulate_4": Workload("accumulation of 4, a batch", accumulate=4),
    "defaults": Workload("defaults", defaults=True),
    "log": Workload("defaults, each loss logged", defaults=True, log=True),
    "middle": Workload("step of 5 to 10 ms, AdamW", size=MIDDLE, optimizer=ADAMW, share=0.25, turn=5),
    "evaluation": Workload("evaluation, a batch", evaluates=True),
    "epochs_of_10": Workload("epochs of 10 steps, a step", epoch=10),
    "iterable": Workload("batches of an iterable", iterable=True),
    "heard_10": Workload("10 callbacks with a hook per step", heard=10),
    "heard_50": Workload("50 callbacks with a hook per step", heard=50),
    "idle_50": Workload("50 callbacks without hooks", idle=50),
}
