"""Kill a training with -9 at random instants, start it again, and compare the final weights with those of a run left alone.

    python benchmarks/kill.py [--kills 200] [--precision fp32]

Half of the kills come at a random moment, half while a checkpoint is being written. The model has dropout, batch norm, AdamW, a
schedule and an average of its weights; 3 batches make a step, the data are shuffled and augmented at random, with 0 or 2
workers; there is evaluation and early stopping. Needs a system that can fork.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, EarlyStopping, Ema, Evaluate, LearningRate, LogTraining
from cadenza.store import Store
from cadenza.store.tree import first_difference

SAMPLES, STEPS = 96, 40


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Noisy points: every reading of a sample draws new noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.full((16,), index / SAMPLES) + 0.1 * torch.rand(16) + 0.1 * random.random()
        return point, torch.tensor(index % 3)


def train(directory: Path, workers: int, precision: str) -> None:
    """Train, or go on with the training, in this process; write the final weights beside the checkpoints."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Dropout(0.3), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
    )
    ema = Ema(0.9)
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(Points(), batch_size=4, shuffle=True, num_workers=workers),
        supervised(nn.CrossEntropyLoss()),
        max_steps=STEPS,
        accumulate=3,
        seed=7,
        precision=precision,
        directory=directory,
        driver="cpu",
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)),
            ema,
            Evaluate(DataLoader(Points(), batch_size=32)),
            EarlyStopping("eval/loss", mode="min", patience=50),
            LogTraining("1 step", throughput=False),
            Checkpoint("2 steps", keep_last=3, keep_best=("eval/loss", "min")),
        ],
    )
    trainer.fit(resume="auto")
    final = {"model": dict(model.state_dict()), "ema": averaged(ema, directory)}
    torch.save(final, directory / "final.new")
    (directory / "final.new").replace(directory / "final")


def averaged(ema: Ema, directory: Path) -> dict[str, Tensor]:
    """Return the averaged weights; out of the last checkpoint if the run was over, and only this was left to do."""
    if ema.average is not None:
        return dict(ema.average.state_dict())
    store = Store(directory / "checkpoints")
    newest, _ = store.latest()
    assert newest is not None, "the run ended with a checkpoint"
    average: dict[str, Tensor] = store.read(newest).state["callbacks"]["Ema"]["average"]
    return average


def start(directory: Path, workers: int, precision: str) -> int:
    """Start a training in a child; return its process id."""
    if child := os.fork():
        return child
    code = 1
    with directory.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 2)
    try:
        train(directory, workers, precision)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    in_a_save: int = 0
    unreadable: int = 0
    failed: int = 0
    exact: int = 0
    differences: list[str] = field(default_factory=list)


def wait_for_save(directory: Path, number: int, child: int) -> None:
    """Return when the temporary folder of the `number`-th save is there, or the child has ended."""
    seen: set[str] = set()
    while len(seen) < number and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        seen |= {path.name for path in (directory / "checkpoints").glob(".tmp-*")}


def one_trial(
    folder: Path, workers: int, precision: str, reference: Path, run_s: float, dice: random.Random, tally: Tally
) -> None:
    """Kill one training up to three times, let it end, and compare."""
    child = start(folder, workers, precision)
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.5:
            wait_for_save(folder, dice.randint(1, 6), child)
        else:
            time.sleep(dice.uniform(0.05, run_s))
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tally.kills += 1
        tally.in_a_save += any((folder / "checkpoints").glob(".tmp-*"))
        _, skipped = Store(folder / "checkpoints").latest()
        tally.unreadable += bool(skipped)
        child = start(folder, workers, precision)
    _, status = os.waitpid(child, 0)
    if status != 0:
        tally.failed += 1
        last = folder.with_suffix(".log").read_text().splitlines()[-30:]
        tally.differences.append("\n  ".join([f"status {status}", *last]))
        return
    difference = first_difference(torch.load(reference), torch.load(folder / "final"))
    tally.exact += difference is None
    tally.differences += [difference] if difference else []


def main() -> int:
    """Kill, compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dice, bad = random.Random(arguments.seed), 0
    print(
        "| workers | precision | kills | inside a save | runs | ended in the same bits "
        "| newest unreadable | failed to continue |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for workers in arguments.workers:
            reference = Path(place, f"reference-{workers}")
            begin = time.monotonic()
            os.waitpid(start(reference, workers, arguments.precision), 0)
            run_s, tally, trials = time.monotonic() - begin, Tally(), 0
            while tally.kills < arguments.kills // len(arguments.workers):
                trials += 1
                folder = Path(place, f"{workers}-{trials}")
                one_trial(folder, workers, arguments.precision, reference / "final", run_s, dice, tally)
            row = [
                workers,
                arguments.precision,
                tally.kills,
                tally.in_a_save,
                trials,
                tally.exact,
                tally.unreadable,
                tally.failed,
            ]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            for difference in tally.differences:
                print("  differs:", difference)
            bad += trials - tally.exact + tally.unreadable
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
