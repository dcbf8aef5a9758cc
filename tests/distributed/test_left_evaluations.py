"""A signal to one rank during an evaluation: all ranks leave it before the same batch, and repeat it after the resume."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining, SlurmRequeue
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from cadenza.engine.session import session_of
from cadenza.loading.evaluation import Evaluation
from cadenza.testing import launch
from tests.distributed.parts import Batch, judged, loader, rank, trainer

DRIVERS: dict[str, Callable[[], Driver]] = {
    "ddp": lambda: DdpDriver("cpu", timeout_s=100),
    "fsdp": lambda: FsdpDriver(device="cpu", timeout_s=100),
}


@pytest.mark.parametrize(("driver", "every"), [("ddp", "1 epoch"), ("fsdp", "2 steps")])
def test_all_ranks_leave_before_the_same_batch_and_continue_to_the_same_bits(tmp_path: Path, driver: str, every: str) -> None:
    def training(directory: Path, disturbed: bool) -> tuple[Any, ...]:
        batches: list[int] = []

        def slow(model: nn.Module, batch: Batch) -> dict[str, Any]:
            time.sleep(0.03 * disturbed)
            return judged(model, batch)

        @on(Callback.on_eval_batch_start)
        def send(run: Run, evaluation: Evaluation, batch: Batch) -> None:
            if disturbed and rank() == 1 and (run.progress.step, evaluation.batch) == (6, 1):
                os.kill(os.getpid(), signal.SIGTERM)

        @on(Callback.on_eval_end)
        def count(run: Run, evaluation: Evaluation) -> None:
            batches.append(evaluation.batch)

        @on(Callback.on_step_end)
        def logs(run: Run) -> None:
            run.log({"after/loss": float(session_of(run).step.last_window.losses[0]), "after/rank": run.driver.rank})

        judges = Evaluate(loader(75, 1, shuffle=False), compute=slow, every=every)
        callbacks = [
            send,
            count,
            Checkpoint("100 steps"),
            LogTraining("1 step"),
            judges,
            logs,
            EarlyStopping("eval/loss", mode="min"),
        ]
        one = trainer(max_epochs=4, directory=directory, callbacks=callbacks, driver=DRIVERS[driver]())
        status = None
        try:
            run = one.fit(resume="auto")
        except SystemExit as end:
            return end.code, batches[-1]
        history = [(name, run.history[name]) for name in run.history.names if not name.endswith("per_s")]
        return status, history, [value.clone() for value in one.driver.unwrap(run.model).state_dict().values()]

    def all_of_it() -> list[Any]:
        whole = training(tmp_path / "whole", disturbed=False)
        left = training(tmp_path / "run", disturbed=True)
        again = training(tmp_path / "run", disturbed=False)
        equal = again[1] == whole[1] and all(
            torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))
            for one, other in zip(again[2], whole[2], strict=True)
        )
        return [left, equal]

    first, second = launch(all_of_it)
    assert first == second
    (status, batches), equal = first
    assert status == 143
    assert 2 <= batches < 37  # of 38 and 37
    assert equal


def test_the_main_process_alone_puts_the_job_back_once(tmp_path: Path) -> None:
    calls, program = tmp_path / "calls", tmp_path / "requeue"
    program.write_text(f"#!/bin/sh\necho $* >> {calls}\n")
    program.chmod(0o755)

    def requeued() -> object:
        os.environ["SLURM_JOB_ID"] = "41"

        @on(Callback.on_step_end, at=2)
        def send(run: Run) -> None:
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

        callbacks = [Checkpoint("100 steps"), send, SlurmRequeue((str(program),))]
        with pytest.raises(SystemExit) as end:
            trainer(max_epochs=9, directory=tmp_path / "run", callbacks=callbacks).fit()
        return end.value.code

    assert launch(requeued) == [138, 138]
    assert calls.read_text() == "41\n"
