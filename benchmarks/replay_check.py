"""Detection and cost of `ReplayCheck`: flipped bits of four kinds, checks of clean steps, and the time of a check.

    python benchmarks/replay_check.py [--flips 100] [--clean 1000] [--steps 600] [--width 512]

A bit flips in each step of four runs, in a gradient, an activation, a buffer or a weight, at a position drawn from the step
number. A flip is found if its step has the decision, and the update had the right numbers if the run, with
``action="majority"``, ends with the weights of the clean run. The cost is that of a network whose steps are those of
`benchmarks/capsule.py`: every tenth step is checked, and compared with the steps between. One thread.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import ReplayCheck

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.callbacks.flips import KINDS, Flip, Kind, same, state_of, trainer  # not a part of the package

STEPS_IN_EPOCH = 5  # the batch size of the tests' trainer
APART = 10  # steps from one checked step to the next, for the cost


def found(kinds: Sequence[Kind], count: int) -> tuple[int, int, bool]:
    """Flip a bit in each of so many steps. Return the flips, those found, and whether the weights are those of a clean run."""
    epochs = -(-count // STEPS_IN_EPOCH)
    flips = Flip(kinds)
    run = trainer([flips, ReplayCheck(every=1, action="majority")], max_epochs=epochs).fit()
    told = {decision.data["step"] for decision in run.decisions if decision.what == "replay differed"}
    right = same(state_of(trainer([], max_epochs=epochs).fit()), state_of(run))
    return len(flips.done), len(told & {step for step, _, _ in flips.done}), right


def alarms(count: int) -> tuple[int, int]:
    """Check so many clean steps. Return the checks, and how many of them reported a difference."""
    check = ReplayCheck(every=1, action="warn")
    run = trainer([check], max_epochs=-(-count // STEPS_IN_EPOCH)).fit()
    return len(check.steps), sum(decision.what == "replay differed" for decision in run.decisions)


class Clock(Callback):
    """Takes the time of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._last = 0.0

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        self.times.append(now - self._last)
        self._last = now


def cost(steps: int, width: int, batch_size: int = 128) -> tuple[float, float]:
    """Return the time of a step in ms, and the time of a checked step as a multiple of those before and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
    data = [(torch.randn(batch_size, width), torch.randn(batch_size, width)) for _ in range(8)]
    clock = Clock()
    Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 1e-4),
        data,
        supervised(nn.MSELoss()),
        max_steps=steps,
        callbacks=[ReplayCheck(every=APART), clock],
        device="cpu",
        progress=False,
    ).fit()
    times = clock.times
    checked = range(2 * APART - 1, len(times) - 1, APART)  # the first check is slower
    around = [statistics.median(times[step - 4 : step]) for step in checked]
    ratios = [times[step] / other for step, other in zip(checked, around, strict=True)]
    return statistics.median(around) * 1000, statistics.median(ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--clean", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for kind in KINDS:
        flipped, seen, right = found([kind], given.flips)
        weights = "the weights are those of a clean run" if right else "THE WEIGHTS DIFFER from those of a clean run"
        print(f"flipped bits, {kind}: {seen} of {flipped} found before the update; {weights}")
    checks, differences = alarms(given.clean)
    print(f"clean steps: {differences} alarms in {checks} checks")
    step, ratio = cost(given.steps, given.width)
    print(f"a checked step takes {ratio:.2f} times a step of {step:.1f} ms", end="; ")
    print(f"with every='1000 steps', a run takes {(ratio - 1) / 1000:.2%} longer")


if __name__ == "__main__":
    main()
