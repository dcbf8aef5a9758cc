"""Cost of a step with ``Trainer(compile="step")``, compared with the loop by hand.

    python benchmarks/compiled_step.py [--turns 200] [--middle]

Every way has a thread of one process. They take turns of 5 steps, and the measure is the CPU time of the thread. A ratio is
the median over paired turns. "By hand, again" shows the noise of the measurement. The first 20 turns are left out: compilation.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo  # before the threads, which would import it at once
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on

STEPS, WARM = 5, 20
TINY, MIDDLE = ((32, 64, 10), 16), ((784, 512, 512, 10), 64)

WAYS: dict[str, Any] = {  # what is compiled; None by hand
    "by hand": None,
    "by hand, again": None,
    "by hand, fused": None,
    "Cadenza": False,
    'Cadenza, compile="step"': "step",
}

Batch = tuple[Tensor, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


class Turns:
    """Lets threads do five steps each, in turn, and keeps the CPU time of each turn."""

    def __init__(self, names: list[str], turns: int) -> None:
        self.names, self.turns = names, turns
        self.taken: dict[str, list[float]] = {name: [] for name in names}
        self._locks = {name: threading.Lock() for name in names}
        for lock in self._locks.values():
            lock.acquire()

    def begin(self, name: str) -> None:
        """Wait for a turn of the loop `name`."""
        self._locks[name].acquire()
        self._began = time.thread_time()

    def count(self, name: str, step: int) -> None:
        """End a turn after five steps, and wait for the next one."""
        if step % STEPS == 0:
            self.taken[name].append(time.thread_time() - self._began)
            self._locks[self.names[(self.names.index(name) + 1) % len(self.names)]].release()
            if len(self.taken[name]) < self.turns:
                self.begin(name)

    def run(self, loops: dict[str, Callable[[], object]]) -> None:
        """Run all loops."""
        threads = [threading.Thread(target=loop, daemon=True) for loop in loops.values()]
        for thread in threads:
            thread.start()
        self._locks[self.names[0]].release()
        for thread in threads:
            thread.join()

    def ratio(self, name: str, base: str) -> float:
        """Return the median of the ratios of paired turns."""
        pairs = zip(self.taken[name][WARM:], self.taken[base][WARM:], strict=True)
        return statistics.median(mine / other for mine, other in pairs)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def new_model(widths: tuple[int, ...]) -> nn.Module:
    """Return an MLP, always with the same weights."""
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def by_hand(turns: Turns, name: str, model: nn.Module, make: Make, batches: list[Batch]) -> None:
    """Train by hand."""
    optimizer = make(model.parameters())
    turns.begin(name)
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        turns.count(name, step)


def trained(turns: Turns, name: str, model: nn.Module, make: Make, batches: list[Batch], compile: Any) -> None:
    """Train with a trainer."""

    @on(Callback.on_step_end)
    def count(run: Run) -> None:
        turns.count(name, run.progress.step)

    @on(Callback.on_fit_start)
    def begin(run: Run) -> None:
        turns.begin(name)

    given = {"callbacks": [count, begin], "device": "cpu", "progress": False, "compile": compile}
    Trainer(model, make, batches, loss_of, max_epochs=1, **given).fit()


def measured(widths: tuple[int, ...], size: int, make: Make, fused: Make, number: int) -> None:
    """Print the ratios of all ways."""
    torch.manual_seed(1)
    batches = [(torch.randn(size, widths[0]), torch.randint(widths[-1], (size,))) for _ in range(STEPS)] * number
    models: dict[str, nn.Module] = {}
    ways = Turns([*WAYS], number)
    loops: dict[str, Callable[[], object]] = {}
    for name, compile in WAYS.items():
        model = models[name] = new_model(widths)
        own = fused if name == "by hand, fused" else make
        by = partial(by_hand, ways, name, model, own, batches)
        loops[name] = by if compile is None else partial(trained, ways, name, model, own, batches, compile)
    ways.run(loops)
    base = statistics.median(ways.taken["by hand"][WARM:]) / STEPS * 1e6
    print(f"  by hand {base:.0f} us a step")
    for name in WAYS:
        pairs = zip(models[name].parameters(), models["by hand"].parameters(), strict=True)
        difference = max((mine - other).abs().max().item() for mine, other in pairs)
        print(f"  {name:26} {ways.ratio(name, 'by hand'):.3f}   largest difference of a weight {difference:.1e}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=220)
    parser.add_argument("--middle", action="store_true", help="measure the step of 5 to 10 ms too")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    makes: dict[str, tuple[Make, Make]] = {
        "AdamW": (lambda held: torch.optim.AdamW(held, 1e-3), lambda held: torch.optim.AdamW(held, 1e-3, fused=True)),
        "SGD": (lambda held: torch.optim.SGD(held, 1e-2), lambda held: torch.optim.SGD(held, 1e-2, fused=True)),
    }
    for widths, size in [TINY, *([MIDDLE] if arguments.middle else [])]:
        for name, pair in list(makes.items())[: 1 if arguments.quick else 2]:
            print(f"{name}, MLP {'-'.join(map(str, widths))}, batches of {size}")
            measured(widths, size, *pair, arguments.turns)


if __name__ == "__main__":
    main()
