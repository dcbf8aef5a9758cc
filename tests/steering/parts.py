"""Runs in processes of their own, and the commands that ask and steer them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import until

ENDLESS = """
import sys, time
import torch
from cadenza import Callback, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.testing import tiny_loader

class Wait(Callback):
    def on_step_start(self, run):
        time.sleep(0.01)

callbacks = [LogTraining("1 step"), Evaluate(tiny_loader(), "20 steps"), Checkpoint("10 steps"), Wait()]
model = torch.nn.Linear(1, 1)
Trainer(
    model, torch.optim.SGD(model.parameters(), 0.01), tiny_loader(), supervised(torch.nn.MSELoss()), max_steps=100_000,
    directory=sys.argv[1], callbacks=callbacks, seed=1,
).fit(resume="auto")
"""

STEERED = """
import sys, time
import torch
from cadenza import Callback, Trainer, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.steering import Steering
from cadenza.testing import tiny_loader

class Wait(Callback):
    def on_step_start(self, run):
        time.sleep(0.01)

torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
run = Trainer(
    model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), tiny_loader(), supervised(torch.nn.MSELoss()),
    max_steps=int(sys.argv[2]), directory=sys.argv[1], seed=1,
    callbacks=[LogTraining("1 step"), Evaluate(tiny_loader(), "50 steps"), Checkpoint("10 steps"), Wait(), Steering()],
).fit(resume="auto")
"""
"""A run of steps of 10 ms that takes acts: its directory, and how many steps it has."""


def ask(run: Path | str, *question: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the answer of ``cadenza ask --json`` in a process of its own."""
    done = command("ask", str(run), *question, "--json")
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cadenza", *arguments], capture_output=True, text=True, check=False, **options)


@contextmanager
def training(script: str, *arguments: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Train in another process, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def steps_of(run: Path) -> int:
    """Return the number of records that a run has written."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def until_steps(run: Path, steps: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a run has written so many records."""

    def reached() -> bool:
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        return steps_of(run) >= steps

    until(reached)
