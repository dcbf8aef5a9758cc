"""Runs in processes of their own that wait at a step until a file appears: for commands that look at a run in progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.testing import tiny_loader, tiny_trainer
from tests.waiting import until

SERVER = multiprocessing.get_context("forkserver")  # it imports torch once, and each process is a real one
SERVER.set_forkserver_preload(["tests.commands.going_on"])


def train(directory: Path, waits_after: int, steps: int) -> None:
    """Start or continue a run; after a step it waits for a file named ``go``."""

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log("number", run.progress.step)

    @on(Callback.on_step_start)
    def wait(run: Run) -> None:
        while run.progress.step == waits_after and not (directory / "go").exists():
            time.sleep(0.01)

    evaluate = Evaluate(tiny_loader(1), every="2 steps")
    checkpoint = Checkpoint(every="3 steps", keep_best=("eval/loss", "min"))
    tiny_trainer(callbacks=[log, wait, evaluate, checkpoint], steps=steps, directory=directory, seed=1).fit(resume="auto")


def going_on(directory: Path, waits_after: int, steps: int = 9) -> BaseProcess:
    """Start or continue a run in another process; return when it waits."""
    process = SERVER.Process(target=train, args=(directory, waits_after, steps), daemon=True)
    process.start()
    log = directory / "metrics.jsonl"
    until(lambda: process.exitcode is not None or (log.exists() and len(log.read_text().splitlines()) >= waits_after))
    assert process.exitcode is None
    return process


def killed(directory: Path, waits_after: int = 4) -> Path:
    """Kill a run after a step, as a machine without memory does."""
    kill(going_on(directory, waits_after))
    return directory


def kill(process: BaseProcess) -> None:
    """Kill a process, and wait for its end."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(300)
