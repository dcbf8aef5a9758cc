"""What `Capsule` costs steps of about 2.5 and 5 ms: steps with and without it in turn, in one run.

    python benchmarks/capsule.py [--steps 2000] [--widths 320 512]

In every second step the hooks of `Capsule` return at once. The steps of both kinds are compared by their medians, their tenth
percentiles, and the mean of the paired differences between the quartiles. On a busy machine these differ by more than the
cost, so the time inside of the hooks is measured too: medians and tenth percentiles of each hook, added up. One thread.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cadenza import Callback, Listener, Run, Trainer, supervised
from cadenza.callbacks import Capsule

WARM = 20  # steps that are not measured
OUTSIDE = ("on_setup", "on_fit_start", "on_exception", "on_fit_end")


class EverySecond(Capsule):
    """A capsule that works in odd steps only, and takes the time of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[float]] = {}

    def listeners(self) -> list[Listener]:
        own = super().listeners()
        for one in own:
            name = one.moment.__name__
            if name not in OUTSIDE:
                times = self.times.setdefault(name, [])
                one.function = _in_odd_steps(one.function, times, ended=name == "on_step_end")
        return own


def _in_odd_steps(function: Callable[..., Any], times: list[float], *, ended: bool) -> Callable[..., Any]:
    def call(run: Run, *values: Any) -> None:
        if (run.progress.step - ended) % 2 == 0:
            begin = time.perf_counter()
            function(run, *values)
            times.append(time.perf_counter() - begin)

    return call


class Clock(Callback):
    """Takes the time of each step, from one step boundary to the next."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._last = 0.0

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        if run.progress.step > WARM:
            self.times.append(now - self._last)
        self._last = now


def step_times(steps: int, width: int, batch_size: int) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Train, and return the seconds of the steps with a capsule, of those without, and of each hook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
    data = [(torch.randn(batch_size, width), torch.randn(batch_size, width)) for _ in range(8)]
    clock, capsule = Clock(), EverySecond()
    with tempfile.TemporaryDirectory() as directory:
        Trainer(
            model,
            lambda parameters: torch.optim.AdamW(parameters, 1e-4),
            data,
            supervised(nn.MSELoss()),
            max_steps=steps + WARM,
            directory=directory,
            callbacks=[capsule, clock],
            device="cpu",
            progress=False,
        ).fit()
    return clock.times[0::2], clock.times[1::2], {name: times[WARM:] for name, times in capsule.times.items()}


def tenth(times: Sequence[float]) -> float:
    """Return the tenth percentile."""
    return sorted(times)[len(times) // 10]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--widths", type=int, nargs="+", default=[320, 512])
    parser.add_argument("--batch-size", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for width in given.widths:
        with_it, without, hooks = step_times(given.steps, width, given.batch_size)
        differences = sorted(one - other for one, other in zip(with_it, without, strict=True))
        quarter = len(differences) // 4
        typical = statistics.fmean(differences[quarter:-quarter])
        usual, best = sum(map(statistics.median, hooks.values())), sum(map(tenth, hooks.values()))
        print(f"a step takes {statistics.median(without) * 1000:.2f} ms in the median, {tenth(without) * 1000:.2f} ms at best")
        print(f"  with / without: medians {statistics.median(with_it) / statistics.median(without):.4f}", end=", ")
        print(f"tenth percentiles {tenth(with_it) / tenth(without):.4f}, paired differences {typical * 1e6:.0f} us")
        print(f"  in the hooks: {usual * 1e6:.0f} us, {usual / statistics.median(without):.2%} of a step", end="; ")
        print(f"at best {best * 1e6:.0f} us, {best / tenth(without):.2%}")


if __name__ == "__main__":
    main()
