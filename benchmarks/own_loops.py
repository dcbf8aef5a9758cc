"""Cost of a step in loops with ``trainer.steps()`` and ``cadenza.attach``, compared with the hand-written loop.

    python benchmarks/own_loops.py [--rounds 60] [--steps 500]

The model is an MLP 32-64-10, batches of 16, SGD, one thread: a step of some hundred microseconds, so that overhead shows. The
loops take turns. Times are CPU time of 20 steps, those at the beginning of a run left out. The ratios are those of the medians
and, since other processes only make a step slower, of the tenth percentiles.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cadenza import Trainer, attach

CHUNK = 20
GOALS = {"steps()": 1.03, "attach": 1.05, "attach, loop.batch()": None}

Batches = list[tuple[Tensor, Tensor]]
LOSS = nn.CrossEntropyLoss()


class Timed(nn.Sequential):
    """A network that notes the CPU time of its forward passes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.passes, self.at = 0, list[float]()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, 10)."""
        if self.passes % CHUNK == 0:
            self.at.append(time.process_time())
        self.passes += 1
        outputs: Tensor = super().forward(inputs)
        return outputs


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Train by hand."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = LOSS(model(inputs), targets)
        loss.backward()
        optimizer.step()


def over_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Train in a loop over ``trainer.steps()``."""
    for step in Trainer(model, optimizer, batches, max_steps=len(batches), device="cpu", progress=False).steps():
        for inputs, targets in step:
            step.backward(LOSS(model(inputs), targets))


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Train in an attached loop."""
    rest = iter(batches)
    with attach(model, optimizer, max_steps=len(batches), device="cpu", progress=False) as loop:
        while not loop.over():
            inputs, targets = next(rest)
            with loop.step():
                loop.backward(LOSS(model(inputs), targets))
                loop.update()


def attached_batches(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Train in an attached loop, with the moments of batches."""
    rest = iter(batches)
    with attach(model, optimizer, max_steps=len(batches), device="cpu", progress=False) as loop:
        while not loop.over():
            with loop.step():
                with loop.batch(next(rest)) as (inputs, targets):
                    loop.backward(LOSS(model(inputs), targets))
                loop.update()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """Train without a user-written loop."""
    trainer = Trainer(
        model,
        optimizer,
        batches,
        lambda model, batch: LOSS(model(batch[0]), batch[1]),
        max_steps=len(batches),
        device="cpu",
        progress=False,
    )
    trainer.fit()


LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Batches], None]] = {
    "by hand": by_hand,
    "steps()": over_steps,
    "attach": attached,
    "attach, loop.batch()": attached_batches,
    "fit": fit,
}


def measured(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the CPU seconds of a step, by loop. The weights must be bit-identical to those of the hand-written loop."""
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(steps)]
    times: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        weights: dict[str, Tensor] = {}
        for name, loop in LOOPS.items():
            torch.manual_seed(0)
            model = Timed(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            gc.collect()
            loop(model, optimizer, batches)
            times[name] += [(later - earlier) / CHUNK for earlier, later in itertools.pairwise(model.at[3:])]
            weights[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for name, ends in weights.items():
            if not torch.equal(ends, weights["by hand"]):
                raise RuntimeError(f"{name} ends with other weights than the loop by hand")
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = measured(arguments.rounds, arguments.steps)
    middle = {name: statistics.median(values) for name, values in times.items()}
    low = {name: statistics.quantiles(values, n=10)[0] for name, values in times.items()}
    print(f"{'':22} median  tenth percentile  goal")
    print(f"{'by hand, us':22} {middle['by hand'] * 1e6:6.0f} {low['by hand'] * 1e6:10.0f}")
    for name in [*LOOPS][1:]:
        goal = GOALS.get(name)
        ratios = f"{middle[name] / middle['by hand']:6.3f} {low[name] / low['by hand']:10.3f}"
        print(f"{name:22} {ratios}         {'' if goal is None else f'{goal:.2f}'}")


if __name__ == "__main__":
    main()
