"""Records of runs that are killed or interrupted by a signal: each is there once after the resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.testing import tiny_loader, tiny_trainer
from tests.forked import start


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train(directory: Path, kill_at: int = -1) -> None:
    """Log every step, and save every 20 steps."""

    @on(Callback.on_step_end)
    def step(run: Run) -> None:
        if run.progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [LogTraining("1 step", throughput=False), Checkpoint("20 steps"), step]
    tiny_trainer(callbacks=callbacks, steps=60, seed=1, directory=directory).fit(resume="auto")


def test_a_kill_loses_no_record_of_a_checkpoint_and_the_resumed_run_has_every_record_once(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    killed = start(train, tmp_path / "killed", 55, output=tmp_path / "written")
    assert killed.ended() == -signal.SIGKILL, killed.said()
    steps = [row["step"] for row in rows(tmp_path / "killed")]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 40, "a checkpoint writes the records before it"
    train(tmp_path / "killed")
    whole, again = ([{**row, "time": 0} for row in rows(tmp_path / name)] for name in ("whole", "killed"))
    assert again == whole
    assert len(again) == 60


def test_a_run_that_is_interrupted_in_an_evaluation_keeps_what_the_step_has_logged(tmp_path: Path) -> None:
    """The rest of the step is repeated after the resume."""

    class Before(Callback):
        def on_step_end(self, run: Run) -> None:
            run.log("mean", run.progress.step, reduce="mean", weight=3)
            run.log("sum", 1, reduce="sum")

    class After(Before):
        pass

    def fit(*, interrupted: bool) -> Run:
        @on(Callback.on_eval_batch_end, when=lambda run: interrupted and run.progress.step == 2)
        def interrupt(run: Run, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

        evaluate = Evaluate(tiny_loader(2), every="1 step")
        callbacks = [Before(), evaluate, After(), interrupt, Checkpoint("1 step")]
        return tiny_trainer(callbacks=callbacks, directory=tmp_path, seed=1).fit(resume="auto")

    with pytest.raises(SystemExit):
        fit(interrupted=True)
    run = fit(interrupted=False)
    assert run.history["mean"] == [(step, step) for step in range(1, 6)]
    assert run.history["sum"] == [(step, 2) for step in range(1, 6)]
    assert [line["sum"] for line in rows(tmp_path) if "sum" in line] == [2] * 5
