"""`SlurmRequeue`: a job that a signal ends is put back into the queue once its checkpoint is written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, SlurmRequeue
from cadenza.checkpoint import attempts
from cadenza.checkpoint.store import Store
from cadenza.errors import CheckpointLostError
from cadenza.testing import tiny_trainer


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


def test_after_ctrl_c_and_at_an_ordinary_end_nothing_is_put_back(tmp_path: Path, scontrol: Path) -> None:
    assert end(tmp_path, signal.SIGINT) == []
    tiny_trainer(directory=tmp_path / "other", callbacks=[Checkpoint(), SlurmRequeue()]).fit()
    assert not scontrol.exists()


def test_a_job_without_its_last_checkpoint_is_not_requeued(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Store, "write", full)
    monkeypatch.setattr(attempts, "LAST_PAUSES_S", (0.002, 0.004))
    with pytest.raises(CheckpointLostError):
        tiny_trainer(directory=tmp_path / "run", steps=9, callbacks=[Checkpoint("9 steps"), sends(), SlurmRequeue()]).fit()
    assert not scontrol.exists()


def test_without_slurm_it_says_so_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert end(tmp_path) == []
    assert "SlurmRequeue has no effect: SLURM_JOB_ID is not set" in caplog.text
