"""The parts of a run that have a goal in ``docs/performance.md``, compared with the same work by hand.

    python benchmarks/goals.py [--rounds 40] [--steps 400]

The model is an MLP 32-64-10, batches of 16, SGD, one thread. The ways take turns, in one process. Times are CPU time of all
threads, for 20 steps or 20 batches each; the first ones are left out. The ratios are those of the medians and, since other
processes only slow a step down, of the tenth percentiles. Weights and losses must be bit-identical.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from own_loops import CHUNK, LOSS, Batches, Timed
from torch import Tensor, nn

from cadenza import Callback, Evaluation, Trainer, supervised
from cadenza.callbacks import LogTraining
from cadenza.engine.evaluation import evaluate
from cadenza.sinks import JsonLines

Times = dict[str, list[float]]


class Iterated:
    """A loader that can only be iterated."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.batches


def by_hand(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = LOSS(model(inputs), targets)
        loss.backward()
        optimizer.step()


def trained(model: nn.Module, batches: Iterable[Any], *callbacks: Callback, directory: Path | None = None) -> None:
    """Train for one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "directory": directory, "callbacks": callbacks}
    Trainer(model, optimizer, batches, supervised(LOSS), max_epochs=1, **options).fit()


def logged(model: nn.Module, batches: Batches, *callbacks: Callback) -> None:
    """Train with each loss in ``metrics.jsonl``."""
    with tempfile.TemporaryDirectory() as folder:
        trained(model, batches, LogTraining("1 step"), *callbacks, directory=Path(folder, "run"))


STEPS: dict[str, Callable[[nn.Module, Batches], None]] = {
    "by hand": by_hand,
    "fit": trained,
    "fit, loader that can only be iterated": lambda model, batches: trained(model, Iterated(batches)),
    "fit, each loss logged, no directory": lambda model, batches: trained(model, batches, LogTraining("1 step")),
    "fit, each loss logged": logged,
    "fit, each loss logged, written at once": lambda model, batches: logged(model, batches, JsonLines()),
}
GOALS = {"fit": 1.03, "fit, each loss logged": 1.10, "Cadenza": 1.02, "to the first batch": 1.0}


def network() -> Timed:
    """Return the network, always with the same weights."""
    torch.manual_seed(0)
    return Timed(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def steps(rounds: int, count: int) -> Times:
    """Return the CPU seconds of a step, by way."""
    batches = made(count)
    times: Times = {name: [] for name in STEPS}
    for _ in range(rounds):
        ends: dict[str, Tensor] = {}
        for name, train in STEPS.items():
            model = network()
            gc.collect()
            train(model, batches)
            times[name] += per_batch(model)
            ends[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        check_equal(ends)
    return times


def evaluations(rounds: int, count: int) -> Times:
    """Return the CPU seconds of a batch of an evaluation, by way."""
    batches, model = made(count), network()
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), batches, supervised(LOSS), max_epochs=1, device="cpu", progress=False
    )
    session = trainer._make_session()

    def hand(mode: Callable[[], Any]) -> float:
        total, samples = 0.0, 0
        model.eval()
        with mode():
            for inputs, targets in batches:
                total += LOSS(model(inputs), targets).item() * len(inputs)
                samples += len(inputs)
        model.train()
        return total / samples

    ways: dict[str, Callable[[], float]] = {
        "by hand, no_grad": lambda: hand(torch.no_grad),
        "by hand, inference_mode": lambda: hand(torch.inference_mode),
        "Cadenza": lambda: evaluate(session, Evaluation(batches))["eval/loss"],
    }
    times: Times = {name: [] for name in ways}
    for _ in range(rounds):
        ends: dict[str, Tensor] = {}
        for name, way in ways.items():
            model.passes = 0
            model.at.clear()
            gc.collect()
            ends[name] = torch.tensor(way(), dtype=torch.float32)
            times[name] += per_batch(model)
        check_equal(ends)
    return times


def starts(rounds: int) -> Times:
    """Return the CPU seconds from the call that makes the optimizer to the first forward pass, by way."""
    batches = made(2)
    ways: dict[str, Callable[[nn.Module, Batches], None]] = {"by hand": by_hand, "to the first batch": trained}
    times: Times = {name: [] for name in ways}
    for _ in range(10 * rounds):
        for name, train in ways.items():
            model = network()
            gc.collect()
            begin = time.process_time()
            train(model, batches)
            times[name].append(model.at[0] - begin)
    return times


def made(count: int) -> Batches:
    """Return this many batches."""
    return [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(count)]


def per_batch(model: Timed) -> list[float]:
    """Return the time of a batch, in each segment but the first three."""
    return [(later - earlier) / CHUNK for earlier, later in itertools.pairwise(model.at[3:])]


def check_equal(ends: dict[str, Tensor]) -> None:
    """Raise `RuntimeError` unless all ways ended with the same numbers as the first."""
    first, *others = ends
    for name in others:
        if not torch.equal(ends[name], ends[first]):
            raise RuntimeError(f"{name} ends in other numbers than {first}")


def show(title: str, times: Times) -> None:
    """Print ratios to the first way; for a start, milliseconds."""
    first, *others = times
    low = {name: statistics.quantiles(values, n=10)[0] for name, values in times.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n| {title} | median | tenth percentile | goal |\n|---|---:|---:|---:|")
    print(f"| {first}, us | {middle[first] * 1e6:.0f} | {low[first] * 1e6:.0f} | |")
    for name in others:
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        print(f"| {name} | {middle[name] / middle[first]:.3f} | {low[name] / low[first]:.3f} | {goal} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    show("a step", steps(arguments.rounds, arguments.steps))
    show("a batch of an evaluation", evaluations(arguments.rounds, arguments.steps))
    taken = starts(arguments.rounds)
    print("\n| start, ms | median | tenth percentile |\n|---|---:|---:|")
    for name, values in taken.items():
        print(f"| {name} | {statistics.median(values) * 1e3:.2f} | {statistics.quantiles(values, n=10)[0] * 1e3:.2f} |")


if __name__ == "__main__":
    main()
