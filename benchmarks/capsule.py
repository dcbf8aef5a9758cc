"""Cost of `Capsule` for steps of about 2.5 and 5 ms: alternating blocks of 20 steps with and without it, in one run.

    python benchmarks/capsule.py [--steps 12000] [--widths 320 512] [--dropout 0.1]

In two of three blocks the hooks of `Capsule` return immediately; the difference between these two is noise. The order is
random. The first steps of a block are not measured, because the processor caches still hold data of the previous block.
Blocks are compared by the median of their steps, within each turn of three: printed are the mean of the differences between
their quartiles, and its standard error. The time inside of the hooks is measured in a separate run, as the mean without the
slowest 1 %, since some steps do more than others. One thread.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cadenza import Callback, Listener, Run, Trainer, supervised
from cadenza.callbacks import Capsule

BLOCK = 20  # steps
SETTLING = 3  # the first steps of a block, which are not measured
OUTSIDE = ("on_setup", "on_fit_start", "on_exception", "on_fit_end")
GROUPS = ("without", "without, again", "with")


class InSomeSteps(Capsule):
    """A capsule that is active only in the steps of the last group.

    Args:
        groups: The group of each step.
        timed: Whether to take the time of its hooks.
    """

    def __init__(self, groups: Sequence[int], *, timed: bool) -> None:
        super().__init__()
        self.times: dict[str, list[float]] = {}
        self._groups, self._timed = groups, timed

    def listeners(self) -> list[Listener]:
        own = super().listeners()
        for listener in own:
            if listener.moment.__name__ not in OUTSIDE:
                listener.function = self._in_some_steps(listener.function, self.times.setdefault(listener.moment.__name__, []))
        return own

    def _in_some_steps(self, function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
        groups, timed = self._groups, self._timed

        def call(run: Run, *values: Any) -> None:
            if groups[run.progress.step] == 2:
                if timed:
                    begin = time.perf_counter()
                    function(run, *values)
                    times.append(time.perf_counter() - begin)
                else:
                    function(run, *values)

        return call


class Clock(Callback):
    """Takes the time of each step, from one step boundary to the next."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._last = 0.0

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        self.times.append(now - self._last)
        self._last = now


def trained(
    given: argparse.Namespace, width: int, steps: int, *, timed: bool
) -> tuple[list[list[float]], dict[str, list[float]]]:
    """Train, and return the medians of the blocks of each group, and the times of each hook, in seconds."""
    torch.manual_seed(0)
    drops = [nn.Dropout(given.dropout)] if given.dropout else []
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), *drops, nn.Linear(width, width))
    data = [(torch.randn(given.batch_size, width), torch.randn(given.batch_size, width)) for _ in range(8)]
    draw, turns = random.Random(0), steps // BLOCK // len(GROUPS) + 1
    order = [group for _ in range(turns) for group in draw.sample(range(len(GROUPS)), len(GROUPS))]
    clock, capsule = Clock(), InSomeSteps([group for group in order for _ in range(BLOCK)], timed=timed)
    with tempfile.TemporaryDirectory() as directory:
        Trainer(
            model,
            lambda parameters: torch.optim.AdamW(parameters, 1e-4),
            data,
            supervised(nn.MSELoss()),
            max_steps=len(order) * BLOCK,
            directory=directory,
            callbacks=[capsule, clock],
            device="cpu",
            progress=False,
        ).fit()
    blocks: list[list[float]] = [[] for _ in GROUPS]
    for number, group in enumerate(order):
        if number >= len(GROUPS):  # the first turn warms up
            blocks[group].append(statistics.median(clock.times[number * BLOCK + SETTLING : (number + 1) * BLOCK]))
    return blocks, capsule.times


def difference(group: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the differences between their quartiles, and its standard error, in microseconds."""
    ordered = sorted((time_a - two) * 1e6 for time_a, two in zip(group, other, strict=True))
    middle = ordered[len(ordered) // 4 : len(ordered) * 3 // 4]
    spread = (middle[-1] - middle[0]) / 1.35  # of normally distributed differences; the mean of the middle half has 1.09 of it
    return statistics.fmean(middle), 1.09 * spread / len(ordered) ** 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--widths", type=int, nargs="+", default=[320, 512])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0, help="a model that draws from torch's generator in each step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for width in given.widths:
        (first, *others), _ = trained(given, width, given.steps, timed=False)
        step = statistics.median(first) * 1e6
        print(f"a step takes {step / 1000:.2f} ms")
        for name, group in zip(GROUPS[1:], others, strict=True):
            typical, error = difference(group, first)
            print(f"  {name:14s} {typical:+4.0f} us, {typical / step:+.2%}, standard error {error:.0f} us")
        _, hooks = trained(given, width, given.steps // 4, timed=True)
        inside = sum(statistics.fmean(sorted(times[BLOCK:])[: len(times) * 99 // 100]) for times in hooks.values() if times)
        print(f"  in the hooks   {inside * 1e6:4.0f} us, {inside * 1e6 / step:6.2%}")


if __name__ == "__main__":
    main()
