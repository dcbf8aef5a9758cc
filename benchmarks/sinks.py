"""Cost of each sink per step, as ratios of one interleaved run to the same training without it.

    python benchmarks/sinks.py [--rounds 9] [--only Csv TensorBoard] [--output sinks.json]

Two steps: a tiny one of some hundred microseconds, and one of about 5 ms. Two cadences: a record of four numbers every step,
and every 50 steps. Each run has a directory, so that it keeps ``metrics.jsonl``; the base has one too. Wall time of the steps
alone, from the first to the last: opening and the last records have separate columns. MLflow gets an existing database, because
creating one would overlap with these short runs. One thread for computing; no network: all sinks are offline. Output is
discarded. Sinks that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, supervised
from cadenza.errors import MissingExtraError
from cadenza.sinks import Console, Csv, JsonLines, Mlflow, ProgressBar, Swanlab, TensorBoard, Trackio, Wandb

SINKS: dict[str, Callable[[], Callback]] = {
    "Console": Console,
    "ProgressBar": lambda: ProgressBar("plain"),
    "JsonLines": lambda: JsonLines("own.jsonl"),
    "Csv": Csv,
    "TensorBoard": TensorBoard,
    "Wandb": lambda: Wandb("benchmark", mode="offline", settings={"silent": True}),
    "Mlflow": lambda: Mlflow(f"sqlite:///{os.environ['BENCHMARK_DIR']}/mlflow.db"),
    "Trackio": lambda: Trackio("benchmark"),
    "Swanlab": lambda: Swanlab("benchmark", mode="offline"),
}
QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "SWANLAB_MODE": "offline", "MLFLOW_LOGGING_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Step:
    """A training to measure."""

    name: str
    width: int
    batch_size: int
    steps: int


STEPS = [Step("tiny", width=64, batch_size=16, steps=1000), Step("5 ms", width=768, batch_size=128, steps=150)]


class Clock(Callback):
    """Takes the time at the first step, after the last one, and at the end."""

    def on_fit_start(self, run: Run) -> None:
        run.at_end(self._note_end)

    def on_step_start(self, run: Run) -> None:
        if run.progress.step == 0:
            self.begin = time.perf_counter()

    def on_fit_end(self, run: Run) -> None:
        self.end = time.perf_counter()

    def _note_end(self) -> None:
        self.closed = time.perf_counter()


class LogFour(Callback):
    """Logs four numbers, one of them a tensor."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step_end(self, run: Run) -> None:
        if run.progress.step % self.every == 0:
            step = run.progress.step
            run.log({"train/loss": run.loss or 0.0, "train/lr": 0.1, "train/grad_norm": step / 3, "time/step_s": step / 7})


@dataclass(frozen=True)
class Time:
    """The times of one run, in seconds."""

    open: float
    steps: float
    close: float


def train(step: Step, every: int, sink: Callable[[], Callback] | None, directory: Path) -> Time:
    """Run once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, step.width), nn.ReLU(), nn.Linear(step.width, step.width), nn.Linear(step.width, 10))
    batch = (torch.randn(step.batch_size, 32), torch.randint(0, 10, (step.batch_size,)))
    batches: list[tuple[Tensor, Tensor]] = [batch] * step.steps
    clock = Clock()  # first, so that it is closed last
    callbacks = [clock, LogFour(every), *([sink()] if sink else [])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    objective = supervised(nn.CrossEntropyLoss())
    trainer = Trainer(
        model,
        optimizer,
        batches,
        objective,
        max_epochs=1,
        device="cpu",
        progress=False,
        directory=directory,
        callbacks=callbacks,
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        start = time.perf_counter()
        run = trainer.fit()
    assert run.faults == [], run.faults
    return Time(clock.begin - start, clock.end - clock.begin, clock.closed - clock.end)


def measured(step: Step, every: int, sinks: Iterable[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of each sink, interleaved with the base."""
    times: dict[str, list[Time]] = {name: [] for name in ("none", *sinks)}
    for number in range(rounds + 1):
        for name, taken in times.items():
            with tempfile.TemporaryDirectory() as folder:
                timing = train(step, every, SINKS.get(name), Path(folder, "run"))
            if number:  # the first is for warming up
                taken.append(timing)
    base = times["none"]
    return {
        name: {
            "ratio": statistics.median(timing.steps / other.steps for timing, other in zip(taken, base, strict=True)),
            "us_per_step": statistics.median(timing.steps for timing in taken) / step.steps * 1e6,
            "open_s": statistics.median(timing.open for timing in taken),
            "close_s": statistics.median(timing.close for timing in taken),
        }
        for name, taken in times.items()
    }


def installed(names: Iterable[str]) -> list[str]:
    """Return the sinks that can be created; print the others."""
    found = []
    for name in names:
        try:
            SINKS[name]()
        except MissingExtraError as error:
            print(f"left out: {error}")
        else:
            found.append(name)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=SINKS, default=list(SINKS))
    parser.add_argument("--output", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    os.environ.update(QUIET)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRACKIO_DIR": folder, "BENCHMARK_DIR": folder}
        names = installed(arguments.only)
        for step in STEPS:
            for every in (1, 50):
                figures[f"{step.name}, every {every}"] = measured(step, every, names, arguments.rounds)
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(figures, ["none", *names])


def show(figures: dict[str, dict[str, dict[str, float]]], names: Iterable[str]) -> None:
    """Print ratios as a table, and the times of opening and closing with a record every step."""
    first, *_ = figures
    print("\n| sink | " + " | ".join(figures) + " | opening | the last records |")
    print("|---" * (len(figures) + 3) + "|")
    for name in names:
        cells = [
            f"{of[name]['us_per_step']:.0f} us" if name == "none" else f"{of[name]['ratio']:.2f}" for of in figures.values()
        ]
        ends = [f"{figures[first][name][key]:.2f} s" for key in ("open_s", "close_s")]
        print(f"| {name} | " + " | ".join([*cells, *ends]) + " |")


if __name__ == "__main__":
    main()
