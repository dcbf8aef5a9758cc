"""How long ``cadenza report`` takes, and how large its page is, for many runs, many metrics and many records.

    python benchmarks/report.py [--only "100 runs x 20 metrics"] [--keep DIR]
    python benchmarks/report.py --only "1 run x 1 metric x 1,000,000 records" "1 run x 1 metric x 10,000,000 records"

The runs are written by hand, as a run writes them: noisy curves, the arguments of a search, evaluations with their decisions.
Times depend on this machine and its other load; CPU times depend less on it. The sizes are the same
everywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cadenza.records.record import Record
from cadenza.status.progress import Counters


@dataclass(frozen=True)
class Case:
    """Runs to report on."""

    runs: int
    metrics: int
    records: int

    @property
    def name(self) -> str:
        """The numbers of a case, with the number of records where it says more."""
        runs, metrics = f"{self.runs} run{'s' * (self.runs > 1)}", f"{self.metrics} metric{'s' * (self.metrics > 1)}"
        return f"{runs} x {metrics}" + f" x {self.records:,} records" * (self.records > 2000)


CASES = [Case(1, 4, 2000), Case(3, 20, 2000), Case(100, 20, 2000), Case(1, 2000, 200), Case(1, 1, 1_000_000)]
LONG = Case(1, 1, 10_000_000)
"""Measured only on request, because its run has more than a gigabyte."""


def write_runs(folder: Path, case: Case) -> list[Path]:
    """Write the directories of a case, as if a search over learning rate, width and optimizer had made them."""
    return [write_run(folder / f"run-{number:03}", case, random.Random(number)) for number in range(case.runs)]


def write_run(directory: Path, case: Case, chance: random.Random) -> Path:
    """Write a run: its curves fall to a floor that depends on its arguments."""
    directory.mkdir(parents=True)
    rate, width = 10 ** chance.uniform(-4, -1), chance.choice([64, 128, 256, 512])
    optimizer = {"name": chance.choice(["SGD", "AdamW"]), "lr": rate, "weight_decay": chance.choice([0.0, 0.01, 0.1])}
    floor = 0.1 + abs(math.log10(rate) + 2.5) * 0.15 + 20 / width
    names = [f"group{i // 10}/metric{i}" for i in range(case.metrics - 1)] + ["eval/loss"]
    decisions = []
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, case.records + 1):
            fall = floor + (2.3 - floor) * math.exp(-6 * step / case.records)
            values = {name: fall * (1 + 0.1 * chance.gauss(0, 1)) + i % 10 for i, name in enumerate(names)}
            file.write(Record(Counters(step=step, batch=step), 1.7e9 + step, values).to_json() + "\n")
            if step % max(1, case.records // 10) == 0:
                data = {"results": {"eval/loss": values["eval/loss"]}}
                at = {"epoch": 10 * step // case.records, "step": step, "batch": step, "batch_in_epoch": 0, "samples": 8 * step}
                decisions.append({"what": "evaluated", "who": "Evaluate", "why": "every epoch", **at, "data": data})
    (directory / "decisions.jsonl").write_text("".join(json.dumps(decision) + "\n" for decision in decisions), encoding="utf-8")
    arguments = {"model": f"Mlp, {width * 784:,} parameters", "optimizer": [optimizer], "accumulate": chance.choice([1, 2])}
    info = {
        "id": directory.name,
        "started": "2026-01-01T12:00:00+0000",
        "ended": "2026-01-01T12:40:00+0000",
        "outcome": {"kind": "finished", "reason": "the limit is reached"},
        "arguments": {**arguments, "max_epochs": 10, "precision": "fp32", "seed": chance.randrange(1000)},
        "monitors": [{"monitor": "eval/loss", "mode": "min", "callback": "Checkpoint"}],
        "device": "cpu",
    }
    (directory / "run.json").write_text(json.dumps(info), encoding="utf-8")
    return directory


def measured(case: Case, folder: Path) -> tuple[float, float, int]:
    """Return the seconds that the command takes, imports included, those that it computes, and the bytes of its page."""
    runs, output = write_runs(folder, case), folder / "report.html"
    start, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "cadenza", "report", *map(str, runs), "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy, output.stat().st_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in (*CASES, LONG)], help="the cases to measure")
    parser.add_argument("--keep", type=Path, help="write the runs and the pages to this folder, and keep them")
    chosen = parser.parse_args(arguments)
    print("| runs | time | of the processor | page |\n|---|---|---|---|")
    for case in (*CASES, LONG):
        if case.name not in (chosen.only or [known.name for known in CASES]):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (chosen.keep or Path(temporary)) / case.name.replace(" ", "-").replace(",", "")
            seconds, busy, size = measured(case, folder)
        print(f"| {case.name} | {seconds:.1f} s | {busy:.1f} s | {size / 1e6:.2f} MB |", flush=True)


if __name__ == "__main__":
    main()
