"""A signal to ranks and to jobs of SLURM: all end at one step with a checkpoint, and the next start ends with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining, SlurmRequeue
from cadenza.checkpoint import writer
from cadenza.checkpoint.store import Store
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointLostError
from cadenza.loading.evaluation import Evaluation
from cadenza.testing import launch, tiny_trainer
from tests.checkpoint.store.contents import latest
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import Batch, judged, loader, network, rank, trainer, weights_of
from tests.ports import free_port
from tests.waiting import until


def test_sigterm_on_one_rank_ends_all_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    def terminated() -> tuple[int, object, str]:
        seen: list[int] = []

        @on(Callback.on_step_start)
        def send(run: Run) -> None:
            if run.progress.step == 4 and rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        @on(Callback.on_fit_end)
        def note(run: Run) -> None:
            assert run.outcome is not None
            seen.append(run.progress.step)
            reasons.append(f"{run.outcome.kind}: {run.outcome.reason}")

        reasons: list[str] = []
        one = trainer(max_epochs=5, directory=tmp_path, callbacks=[send, note, Checkpoint("100 steps")])
        with pytest.raises(SystemExit) as end:
            one.fit()
        return seen[0], end.value.code, reasons[0]

    assert launch(terminated) == [(5, 143, "preempted: signal SIGTERM")] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()]


@pytest.mark.parametrize(("driver", "every"), [("ddp", "1 epoch"), ("fsdp", "2 steps")])
def test_all_ranks_leave_before_the_same_batch_and_continue_to_the_same_bits(tmp_path: Path, driver: str, every: str) -> None:
    def training(directory: Path, disturbed: bool) -> tuple[Any, ...]:
        batches, sent = list[int](), [False]

        def slow(model: nn.Module, batch: Batch) -> dict[str, Any]:
            time.sleep(0.03 * sent[0])
            return judged(model, batch)

        @on(Callback.on_eval_batch_start)
        def send(run: Run, evaluation: Evaluation, batch: Batch) -> None:
            sent[0] = disturbed and run.progress.step == 6
            if sent[0] and rank() == 1 and evaluation.batch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        count = on(Callback.on_eval_end)(lambda run, evaluation: batches.append(evaluation.batch))

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
        one = trainer(max_epochs=3, directory=directory, callbacks=callbacks, driver={"ddp": ddp, "fsdp": fsdp}[driver]())
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


# -- processes with the variables that srun sets, and no torchrun

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
    newest, skipped = latest(Store(tmp_path / "run" / "checkpoints"))
    assert newest is not None
    assert (newest.step, skipped) == (3, [])

    assert ended(srun(job)) == [0, 0]
    for number in range(2):
        weights, driver, resumed_at = torch.load(tmp_path / f"task-{number}.pt")
        assert torch.equal(weights, expected)
        assert driver == f"DdpDriver('cpu', rank {number} of 2)"
        assert resumed_at == 3


# -- `SlurmRequeue`: a job that a signal ends is put back into the queue once its checkpoint is written ---


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program of this name on PATH, which writes down its arguments and the checkpoints that are there."""
    calls, program = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/run/checkpoints) >> {calls}\n[ "$2" = 13 ] && exit 3\nexit 0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    handler = signal.getsignal(signal.SIGTERM)
    yield calls
    signal.signal(signal.SIGTERM, handler)


def sends(number: int = signal.SIGUSR1) -> Callback:
    return on(Callback.on_step_end, at=3)(lambda run: os.kill(os.getpid(), number))


def end(directory: Path, number: int = signal.SIGUSR1) -> list[str]:
    """Train until a signal comes in the third step; return what was decided, after the stop."""
    runs: list[Run] = []
    keep = on(Callback.on_fit_start)(runs.append)
    with pytest.raises(SystemExit):
        tiny_trainer(
            directory=directory / "run", steps=9, callbacks=[Checkpoint("9 steps"), keep, sends(number), SlurmRequeue()]
        ).fit()
    return [f"{one.what}: {one.why}" for one in runs[0].decisions if "queue" in one.what]


@pytest.mark.parametrize(
    ("variables", "job", "decided"),
    [
        ({}, "41", "requeued: scontrol requeue 41"),
        ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"}, "40_7", "requeued: scontrol requeue 40_7"),
        ({"SLURM_JOB_ID": "13"}, "13", "not requeued: status 3"),
    ],
    ids=["job", "task of an array", "refused"],
)
def test_the_job_is_put_back_when_the_checkpoint_is_there(
    variables: dict[str, str], job: str, decided: str, tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert end(tmp_path) == [decided]
    assert scontrol.read_text() == f"requeue {job} last step-00000003\n"
    assert ("the job 13 could not be requeued: status 3" in caplog.text) == (job == "13")


def test_after_ctrl_c_at_an_ordinary_end_and_without_slurm_nothing_is_put_back(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert end(tmp_path / "ctrl-c", signal.SIGINT) == []
    tiny_trainer(directory=tmp_path / "other", callbacks=[Checkpoint(), SlurmRequeue()]).fit()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert end(tmp_path / "without") == []
    assert "SlurmRequeue has no effect: SLURM_JOB_ID is not set" in caplog.text
    assert not scontrol.exists()


def test_a_job_without_its_last_checkpoint_is_not_requeued(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Store, "write", full)
    monkeypatch.setattr(writer, "LAST_PAUSES_S", (0.002, 0.004))
    with pytest.raises(CheckpointLostError):
        tiny_trainer(directory=tmp_path / "run", steps=9, callbacks=[Checkpoint("9 steps"), sends(), SlurmRequeue()]).fit()
    assert not scontrol.exists()
