"""Cost of a run as it grows: more callbacks, more records, more samples. Prints markdown tables.

python benchmarks/growth.py [--rounds 5] [--steps 200] [--records 1000000] [--samples 10000000]
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from cadenza import Callback, History, Record, Trainer
from cadenza.status.progress import Counters

Batch = tuple[Tensor, Tensor]


class Heard(Callback):
    """Listens to two moments of each step and does nothing."""

    def on_step_start(self, run: object) -> None: ...
    def on_step_end(self, run: object) -> None: ...


class Idle(Callback):
    """Listens to nothing."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a markdown table."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def callbacks(rounds: int, steps: int) -> None:
    """Time steps with more and more callbacks, in turn."""
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(steps)]
    lists = {("none", 0): 0} | {(kind, count): count for kind in ("idle", "heard") for count in (1, 10, 100, 1000)}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in lists}
    for _ in range(rounds):
        for kind, count in lists:
            made: list[Callback] = [Heard() if kind == "heard" else Idle() for _ in range(count)]
            taken[kind, count].append(_step_time(batches, made))
    base = taken["none", 0]

    def row(key: tuple[str, int]) -> list[str]:
        ratio = statistics.median(a / b for a, b in zip(taken[key], base, strict=True))
        added = statistics.median(a - b for a, b in zip(taken[key], base, strict=True))
        each = f"{added / key[1] / (2 if key[0] == 'heard' else 1) * 1e9:.0f}" if key[1] else ""
        return [f"{key[1]} {key[0]}" if key[1] else "none", f"{statistics.median(taken[key]) * 1e6:.0f}", f"{ratio:.3f}", each]

    table(["callbacks", "a step, us", "ratio to none", "one callback at one moment, ns"], map(row, lists))


def _step_time(batches: list[Batch], listed: list[Callback]) -> float:
    """Return the CPU time of a step, in seconds, without the setup."""
    loss_fn, marks = nn.CrossEntropyLoss(), [0.0]

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        marks.append(time.process_time())
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Trainer(model, optimizer, batches, compute_loss, max_epochs=1, callbacks=listed, device="cpu", progress=False).fit()
    return (marks[-1] - marks[11]) / (len(marks) - 12)


def history(records: int) -> None:
    """Measure the memory and checkpoint size of very many records of three numbers."""
    rows = []
    for limit in (History().limit, 10**9):  # the small one first, because the process's peak is measured
        kept = History(limit)
        before, begin = _peak_mib(), time.process_time()
        for step in range(records):
            kept.add(Record(Counters(step=step), 0.0, {"train/loss": step / 3, "train/lr": step / 7, "norm": step / 11}))
        memory, each = _peak_mib() - before, (time.process_time() - begin) / records
        saved = sum(part.nbytes for values in kept.state_dict().values() for part in values if isinstance(part, Tensor))
        named = "none" if limit == 10**9 else f"{limit} (as it comes)"
        rows.append([named, len(kept["norm"]), f"{memory:.1f}", f"{saved / 2**20:.1f}", f"{each * 1e6:.1f}"])
    print(f"\nHistory after {records} records of three numbers")
    table(["limit", "values kept of a name", "memory, MiB", "in a checkpoint, MiB", "a record, us"], rows)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


START = """
import resource, time, torch
from torch.utils.data import DataLoader, Dataset
from cadenza.loading import TensorBatches, resumable
torch.set_num_threads(1)
class Many(Dataset):
    def __len__(self): return {samples}
    def __getitem__(self, index): return torch.tensor(float(index))
def first(batches): return next(iter(batches))
first(resumable(DataLoader(Many(), 32), 1).batches(0, 0))
kept = torch.zeros({samples}) if "TensorBatches" in {code!r} else None
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
{code}
print(time.perf_counter() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def start(samples: int, rounds: int) -> None:
    """Measure the time to the first batch of a shuffled epoch, each in a separate process."""
    last = samples // 32 - 1
    ways = {
        "torch's DataLoader, shuffled": "first(DataLoader(Many(), 32, shuffle=True))",
        "the same in a run": "first(resumable(DataLoader(Many(), 32, shuffle=True), 1).batches(0, 0))",
        "the same in a run, from its last batch on": (
            f"first(resumable(DataLoader(Many(), 32, shuffle=True), 1).batches(0, {last}))"
        ),
        "in order, in a run, from its last batch on": f"first(resumable(DataLoader(Many(), 32), 1).batches(0, {last}))",
        "TensorBatches, shuffled, in a run": (
            "first(resumable(TensorBatches(kept, batch_size=32, shuffle=True), 1).batches(0, 0))"
        ),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, code in ways.items():
            text = START.format(samples=samples, code=code)
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
            seconds, mib = map(float, done.stdout.split())
            taken[name].append((seconds, mib))
    print(f"\nStart with {samples} samples: to the first batch")
    middle = {name: [statistics.median(part) for part in zip(*rows, strict=True)] for name, rows in taken.items()}
    table(["", "s", "memory, MiB"], ([name, f"{s:.2f}", f"{mib:.0f}"] for name, (s, mib) in middle.items()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=10_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    callbacks(arguments.rounds, arguments.steps)
    start(arguments.samples, arguments.rounds)  # before the large measurements: a process inherits the peak of its parent
    history(arguments.records)


if __name__ == "__main__":
    main()
