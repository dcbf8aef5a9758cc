"""Cost of `ReplicaGroups` beside plain DDP: ratios of the time of a step, in the same processes, in turns.

    OMP_NUM_THREADS=1 python benchmarks/replica_groups.py [--groups 3] [--rounds 5]

Each process is a rank of DDP, and then a group of its own. A step is timed from one end of a step to the next; the first ten
are left out. The ratio is the median over the rounds, of two medians of the same round.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.drivers import DdpDriver, SingleDriver
from cadenza.loading import TensorBatches
from cadenza.parallel import ReplicaGroups
from cadenza.testing import launch

SIZES = {"9 thousand weights": (64, 64, 64, 10), "1 million weights": (784, 700, 600, 10), "8 million": (1024, 2048, 2048, 512)}
"""The widths of the models."""


def step_s(widths: tuple[int, ...], groups: int, lighthouse: str | None, steps: int) -> float:
    """Return the median time of a step, with groups if there is a lighthouse, else with DDP."""
    ends: list[float] = []

    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        ends.append(time.perf_counter())

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
    samples = 16 * steps * groups
    data = (torch.randn(256, widths[0]).repeat(-(-samples // 256), 1)[:samples], torch.randn(samples, widths[-1]))
    Trainer(
        nn.Sequential(*layers),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        TensorBatches(*data, batch_size=16),
        supervised(nn.MSELoss()),
        max_steps=steps,
        progress=False,
        seed=1,
        driver=DdpDriver("cpu") if lighthouse is None else SingleDriver("cpu"),
        callbacks=[note, *([] if lighthouse is None else [ReplicaGroups(groups, lighthouse=lighthouse)])],
    ).fit()
    return statistics.median(after - before for before, after in pairwise(ends[10:]))


def main() -> None:
    """Measure, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29510)
    options = parser.parse_args()
    address = f"127.0.0.1:{options.port}"
    command = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", address, "--min_replicas", str(options.groups)]
    server = subprocess.Popen(
        [*command, "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "1000"]
    )  # forks of a process with its threads would crash

    def measure() -> dict[str, list[tuple[float, float]]]:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        sizes = SIZES.items()
        return {
            name: [
                (
                    step_s(widths, options.groups, None, options.steps),
                    step_s(widths, options.groups, f"http://{address}", options.steps),
                )
                for _ in range(options.rounds)
            ]
            for name, widths in sizes
        }

    try:
        measured = launch(measure, options.groups)[0]
    finally:
        server.terminate()
    for name, rounds in measured.items():
        ddp, groups = (statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(after / before for before, after in rounds)
        print(f"{name}: DDP {1000 * ddp:.2f} ms, replica groups {1000 * groups:.2f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
