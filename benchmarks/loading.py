"""Cost of reading batches and of evaluating on them, as ratios of one interleaved run. Prints markdown tables.

python benchmarks/loading.py [--rounds 15] [--batches 400] [--workers 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from cadenza import Evaluation, Trainer, supervised
from cadenza.engine.evaluation import evaluate
from cadenza.loading import TensorBatches, resumable

Batch = tuple[Tensor, Tensor]


class Accuracy:
    """The fraction of correct predictions, written by hand."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.right, self.seen = torch.zeros((), dtype=torch.int64), 0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        self.right += (predictions.argmax(1) == targets).sum()
        self.seen += len(targets)

    def compute(self) -> float:
        """Return the fraction."""
        return float(self.right) / self.seen


class Once:
    """Batches in order, without a length or positions."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


def in_turn(ways: dict[str, Callable[[], object]], rounds: int, batches: int, base: str, clock: Callable[[], float]) -> None:
    """Run each in turn; print the time of a batch and the median ratio to `base`."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, do in ways.items():
            begin = clock()
            do()
            if number:  # the first round warms up
                taken[name].append((clock() - begin) / batches)
    print("\n| | a batch, us | ratio |\n|---|---|---|")
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken[base], strict=True))
        print(f"| {name} | {statistics.median(times) * 1e6:.1f} | {ratio:.3f} |")


def read(make: Callable[[], Iterable[Any]]) -> Callable[[], object]:
    """Return a function that reads all batches of one pass."""

    def do() -> None:
        for _ in make():
            pass

    return do


def loaders(rounds: int, batches: int, workers: int, shape: tuple[int, int]) -> None:
    """Read the same rows in many ways."""
    size, width = shape
    rows, labels = torch.randn(batches * size, width), torch.randint(0, 10, (batches * size,))
    dataset = TensorDataset(rows, labels)
    in_order = TensorBatches(rows, labels, batch_size=size)
    shuffled = TensorBatches(rows, labels, batch_size=size, shuffle=True)
    plain = DataLoader(dataset, size, shuffle=True)
    ready = list(in_order)
    source, in_run = resumable(shuffled, 1), resumable(DataLoader(dataset, size, shuffle=True), 1)
    print(f"\nBatches of {size} x {width}, {batches} an epoch")
    torchs = "torch's DataLoader, shuffled"
    ways: dict[str, Callable[[], object]] = {
        torchs: read(lambda: plain),
        "the same in a run": read(lambda: in_run.batches(0, 0)),
        "TensorBatches, shuffled, in a run": read(lambda: source.batches(0, 0)),
        "TensorBatches, shuffled, by hand": read(lambda: shuffled),
        "TensorBatches, in order": read(lambda: in_order),
        "a list of ready batches": read(lambda: ready),
    }
    in_turn(ways, rounds, batches, torchs, time.process_time)
    once = resumable(Once(ready), 1)
    ways = {
        torchs: read(lambda: plain),
        "a generator of ready batches": read(lambda: Once(ready)),
        "the same in a run": read(lambda: once.batches(0, 0)),
    }
    in_turn(ways, rounds, batches, torchs, time.process_time)
    if workers:
        options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": True}
        theirs, ours = DataLoader(dataset, size, **options), resumable(DataLoader(dataset, size, **options), 1)
        named = f"torch's, shuffled, {workers} workers"
        ways = {named: read(lambda: theirs), "the same in a run": read(lambda: ours.batches(0, 0))}
        in_turn(ways, rounds, batches, named, time.perf_counter)


class Slow(Dataset[Tensor]):
    """Batches that take a number of microseconds each, of a user's own class."""

    def __init__(self, count: int, us: float) -> None:
        self.count, self.us, self.batch = count, us, torch.randn(16, 32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        end = time.perf_counter() + self.us * 1e-6
        while time.perf_counter() < end:
            pass
        return self.batch


class Stream(IterableDataset[Tensor]):
    """The same as a stream."""

    def __init__(self, data: Slow) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.data.__getitem__, range(len(self.data)))


def own_data(rounds: int, batches: int) -> None:
    """Read data sets of the user's own, in which anything may draw random numbers."""
    for us in (40, 1000):
        slow = Slow(batches if us < 100 else batches // 8, us)
        for kind, data in (("data set", slow), ("IterableDataset", Stream(slow))):
            torchs = f"{kind} of the user, {us} us, DataLoader"
            theirs = DataLoader(data, 1, collate_fn=lambda items: items[0])
            ours = resumable(DataLoader(data, 1, collate_fn=lambda items: items[0]), 1)
            ways = {torchs: read(lambda loader=theirs: loader), "the same in a run": read(lambda ours=ours: ours.batches(0, 0))}
            in_turn(ways, rounds, len(slow), torchs, time.process_time)
    rows = torch.randn(10**7, 4)
    source, order = resumable(TensorBatches(rows, batch_size=16, shuffle=True), 1), torch.randperm(len(rows))
    by_index = "10 million samples, an index loop"
    ways = {
        by_index: read(lambda: (rows[order[16 * number : 16 * number + 16]] for number in range(batches))),
        "shuffled TensorBatches in a run": read(lambda: islice(source.batches(0, 0), batches)),
    }
    in_turn(ways, rounds, batches, by_index, time.process_time)


def evaluations(rounds: int, batches: int) -> None:
    """Evaluate by hand and with Cadenza."""
    data = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(batches)]
    model, loss_fn = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), nn.CrossEntropyLoss()

    def by_hand(mode: Callable[[], Any], metric: Accuracy | None) -> float:
        model.eval()
        total, seen = torch.zeros(()), 0
        with mode():
            for inputs, targets in data:
                predictions = model(inputs)
                total += loss_fn(predictions, targets) * len(inputs)
                seen += len(inputs)
                if metric is not None:
                    metric.update(predictions, targets)
        model.train()
        return total.item() / seen + (metric.compute() if metric is not None else 0.0)

    trainer = Trainer(
        model, lambda p: torch.optim.SGD(p, 0.1), data, supervised(loss_fn), max_epochs=1, device="cpu", progress=False
    )
    run = trainer._make_session()
    loss_only, judged = Evaluation(data), Evaluation(data, metrics={"acc": Accuracy()})
    print(f"\nEvaluation, MLP 32-64-10, batches of 16, {batches} of them")
    loss = "by hand, inference_mode, loss"
    ways: dict[str, Callable[[], object]] = {
        loss: lambda: by_hand(torch.inference_mode, None),
        "by hand, no_grad, loss": lambda: by_hand(torch.no_grad, None),
        "Cadenza, loss": lambda: evaluate(run, loss_only),
    }
    in_turn(ways, rounds, batches, loss, time.process_time)
    both = "by hand, inference_mode, loss and accuracy"
    ways = {
        both: lambda: by_hand(torch.inference_mode, Accuracy()),
        "Cadenza, loss and accuracy": lambda: evaluate(run, judged),
    }
    in_turn(ways, rounds, batches, both, time.process_time)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for shape in ((16, 32), (64, 784)):
        loaders(arguments.rounds, arguments.batches, arguments.workers, shape)
    own_data(arguments.rounds, arguments.batches)
    for batches in (10, arguments.batches):
        evaluations(arguments.rounds if batches > 10 else 20 * arguments.rounds, batches)


if __name__ == "__main__":
    main()
