"""Runs for commands that read directories: one that is over, one that a process still works on, one whose process died."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.waiting import until

Command = Callable[..., Any]
"""The fixture ``cadenza``."""


def trained(directory: Path, lr: float, seed: int = 1, mode: Literal["min", "max"] = "min") -> Path:
    """Train three epochs, with an evaluation after each."""
    callbacks = [LogTraining("1 step"), Evaluate(tiny_loader()), EarlyStopping("eval/loss", mode=mode, patience=1)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    tiny_run(epochs=3, seed=seed, directory=directory, callbacks=callbacks, optimizer=sgd)
    return directory


def rows_of(directory: Path, name: str) -> list[Any]:
    """Return the values of a name in a run's records."""
    rows = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def train(directory: Path, waits_after: int, steps: int) -> None:
    """Start or continue a run; after a step it waits for a file named ``go``, or dies if there is one named ``die``."""

    log = on(Callback.on_step_end)(lambda run: run.log("number", run.progress.step))

    @on(Callback.on_step_start)
    def wait(run: Run) -> None:
        while run.progress.step == waits_after and not (directory / "go").exists():
            if (directory / "die").exists():
                os._exit(1)
            time.sleep(0.01)

    evaluate = Evaluate(tiny_loader(1), every="2 steps")
    checkpoint = Checkpoint(every="3 steps", keep_best=("eval/loss", "min"))
    tiny_trainer(callbacks=[log, wait, evaluate, checkpoint], steps=steps, directory=directory, seed=1).fit(resume="auto")


def going_on(directory: Path, waits_after: int, steps: int = 9) -> BaseProcess:
    """Start or continue a run in another process; return when it waits."""
    process = multiprocessing.get_context("forkserver").Process(target=train, args=(directory, waits_after, steps), daemon=True)
    process.start()
    log = directory / "metrics.jsonl"
    until(lambda: process.exitcode is not None or (log.exists() and len(log.read_text().splitlines()) >= waits_after))
    assert process.exitcode is None
    return process


def let_go(directory: Path, process: BaseProcess) -> None:
    """Let a run go on to its end."""
    (directory / "go").touch()
    process.join(300)


def let_die(directory: Path, process: BaseProcess) -> None:
    """End the process of a run at once, without an end of the run, as a machine without memory does."""
    (directory / "die").touch()
    process.join(300)
    (directory / "die").unlink()


def died(directory: Path, waits_after: int = 4) -> Path:
    """Return the directory of a run whose process ended after a step."""
    let_die(directory, going_on(directory, waits_after))
    return directory
