"""Processes with the variables that srun sets, and no torchrun: they train as one, and a signal ends them with a checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.testing import launch
from tests.distributed.parts import network, trainer, weights_of
from tests.ports import free_port
from tests.waiting import until

OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def variables(job: int, task: int) -> dict[str, str]:
    """Return what ``srun`` sets for a task of two, each on a node of its own. The first node is this machine."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost,node[07-08]",
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(task),
        "SLURM_LOCALID": "0",
    }


def srun(function: Callable[[], object]) -> list[ForkProcess]:
    """Start two processes, as a step of a new job. Their port, which follows from the number of the job, is free."""

    def task(number: int) -> None:
        for name in OF_TORCHRUN:
            os.environ.pop(name, None)
        os.environ |= variables(job, number)
        function()

    job = 40_000 + free_port()
    context = multiprocessing.get_context("fork")
    tasks = [context.Process(target=task, args=(number,), daemon=True) for number in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork beside threads
        for process in tasks:
            process.start()
    return tasks


def ended(tasks: list[ForkProcess]) -> list[int | None]:
    """Return the exit codes."""
    for process in tasks:
        process.join(200)
    return [process.exitcode for process in tasks]


def test_two_tasks_of_srun_end_at_sigterm_with_a_checkpoint_and_the_next_job_ends_with_the_bits_of_one_that_was_not_cut(
    tmp_path: Path,
) -> None:
    def trained(directory: Path, *callbacks: Callback) -> tuple[Tensor, Run]:
        one = trainer(
            model=network(dropout=0.3),
            max_epochs=None,
            max_steps=8,
            directory=directory,
            driver="auto",
            device="cpu",
            callbacks=[Checkpoint(), *callbacks],
        )
        run = one.fit(resume="auto")
        return weights_of(one), run

    def job() -> None:
        number = os.environ["SLURM_PROCID"]

        @on(Callback.on_step_end, at=3)
        def wait(run: Run) -> None:
            (tmp_path / f"ready-{number}").touch()
            until((tmp_path / "sent").exists)

        weights, run = trained(tmp_path / "run", wait)
        torch.save((weights, repr(run.driver), run.progress.origin.step), tmp_path / f"task-{number}.pt")

    expected = launch(lambda: trained(tmp_path / "uncut")[0])[0]

    first = srun(job)
    until(lambda: all((tmp_path / f"ready-{number}").exists() for number in range(2)))
    for process in first:  # as for --signal=TERM@120: to each task
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
    (tmp_path / "sent").touch()
    assert ended(first) == [128 + signal.SIGTERM] * 2
    newest, skipped = Store(tmp_path / "run" / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, skipped) == (3, [])

    assert ended(srun(job)) == [0, 0]
    for number in range(2):
        weights, driver, resumed_at = torch.load(tmp_path / f"task-{number}.pt")
        assert torch.equal(weights, expected)
        assert driver == f"DdpDriver('cpu', rank {number} of 2)"
        assert resumed_at == 3
