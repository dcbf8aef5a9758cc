"""What Cadenza costs on several processes beside DDP by hand, as ratios of wall time in one interleaved run.

    python benchmarks/distributed.py [--ranks 2] [--rounds 15] [--steps 150]

Each round does the steps by hand and with a trainer, in the same processes, on the same batches; the order changes from
round to round. Times are those from the first batch of an epoch to its end. With one rank it is DDP of one process. The
losses must be the same bits. "raw, again" is the loop by hand once more: what the machine itself varies by.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cadenza import Callback, Run, Trainer
from cadenza.drivers import DdpDriver
from cadenza.testing import launch

Batch = tuple[Tensor, Tensor]
Work = Callable[[], Tensor]


class Watched(list[Batch]):
    """Batches that note when the first is asked for, and when there are no more."""

    taken_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        begin = time.perf_counter()
        yield from super().__iter__()
        self.taken_s = time.perf_counter() - begin


class Listening(Callback):
    """Hears the end of each step, and could ask for a stop there."""

    def on_step_end(self, run: Run) -> None: ...


class Logging(Callback):
    """Logs the loss in each step."""

    def on_step_end(self, run: Run) -> None:
        run.log("train/loss", run.loss if run.loss is not None else 0.0)


SIZES = {"tiny": (32, 64, 0, 10, 16), "mlp": (784, 512, 512, 10, 64)}


def network(inputs: int, hidden: int, deeper: int, outputs: int) -> nn.Module:
    """Return an MLP, always with the same weights."""
    torch.manual_seed(0)
    middle = [nn.Linear(hidden, deeper), nn.ReLU()] if deeper else []
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), *middle, nn.Linear(deeper or hidden, outputs))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_hand(model: nn.Module, batches: Watched, driver: DdpDriver) -> Work:
    """DDP as one would write it: each rank its part of the batches."""

    def work() -> Tensor:
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped.train()
        loss = torch.zeros(())
        for number, batch in enumerate(batches):
            if number % driver.world_size == driver.rank:
                loss = cross_entropy(wrapped, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    return work


def by_cadenza(model: nn.Module, batches: Watched, driver: DdpDriver, callbacks: list[Callback]) -> Work:
    """Return the same with a trainer."""

    def work() -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = Trainer(
            model, optimizer, batches, cross_entropy, max_epochs=1, driver=driver, callbacks=callbacks, progress=False
        ).fit()
        assert run.loss is not None
        return run.loss

    return work


def measured(size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, on this rank."""
    torch.set_num_threads(1)
    driver = DdpDriver("cpu")
    *shape, count = SIZES[size]
    torch.manual_seed(1)
    batches = Watched(
        (torch.randn(count, shape[0]), torch.randint(0, shape[3], (count,))) for _ in range(steps * driver.world_size)
    )
    works: dict[str, Work] = {}
    ways: dict[str, Any] = {"no callbacks": [], "a callback": [Listening()], "logging": [Logging()]}
    for name in ("raw", "raw, again"):
        works[name] = by_hand(network(*shape), batches, driver)
    for name, callbacks in ways.items():
        works[name] = by_cadenza(network(*shape), batches, driver, callbacks)
    taken: dict[str, list[float]] = {name: [] for name in works}
    losses: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        names = [*works][number % len(works) :] + [*works][: number % len(works)]
        for name in names:
            driver.barrier()
            losses[name].append(float(works[name]()))
            if number:  # the first is to warm up
                taken[name].append(batches.taken_s)
    if any(one != losses["raw"] for one in losses.values()):
        raise SystemExit(f"the losses are not the same: {losses}")
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    print("| model | ranks | raw DDP, ms a step | raw, again | no callbacks | a callback | logging each step |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for size in SIZES:
        for ranks in given.ranks:
            taken = launch(lambda size=size: measured(size, given.rounds, given.steps), ranks=ranks, timeout_s=900)[0]
            raw = taken.pop("raw")
            ratios = [statistics.median(a / b for a, b in zip(one, raw, strict=True)) for one in taken.values()]
            shown = " | ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"| {size} | {ranks} | {statistics.median(raw) / given.steps * 1e3:.2f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
