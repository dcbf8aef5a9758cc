"""A run survives its disk, its neighbours and its callbacks: saved checkpoints stay, and errors are reported."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.checkpoint.store import Store
from cadenza.errors import DirectoryError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment, moments_of
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_trainer
from tests.callbacks.test_checkpoint import bests
from tests.checkpoint import preempted
from tests.checkpoint.blocked import Blocked
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def wide_model() -> nn.Module:
    """Return a model of 60 kB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 5000), nn.Linear(5000, 1))


def careful(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6)


def steps_in(folder: Path) -> list[int]:
    return [saved.step for saved in Store(folder).saved()]


def decided(run: Run, what: str) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == what]


def between(first: int, last: int, begin: Callable[[], object], end: Callable[[], object]) -> Callback:
    """Return a callback that has a fault begin after one step, and end after another."""

    class Fault(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.progress.step in (first, last):
                savings = [one for one in hooks_of(run).callbacks.values() if isinstance(one, Checkpoint)]
                until(lambda: not any(saving.writer.attempts.busy for saving in savings))  # it is written or has failed
            if run.progress.step == first:
                begin()
            elif run.progress.step == last:
                end()

    return Fault()


# -- the disk -----------------------------------------------------------------------------------------


@pytest.fixture
def no_large_files() -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Return functions that limit the size of files to 20 kB, and lift the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield limit, lift
    lift()


@pytest.mark.parametrize("background", [True, False])
def test_when_files_cannot_be_written_the_training_goes_on_and_the_next_save_succeeds(
    tmp_path: Path, no_large_files: Any, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limit, lift = no_large_files
    seen: list[list[int]] = []
    look = on(Callback.on_step_end, at=6)(lambda run: seen.append(steps_in(tmp_path / "checkpoints")))
    fault = between(3, 7, limit, lift)
    saving = Checkpoint("2 steps", background=background)
    run = tiny_trainer(
        model=wide_model(), optimizer=careful, steps=10, directory=tmp_path, callbacks=[fault, look, saving]
    ).fit()
    assert run.progress.step == 10
    assert seen == [[2]]
    assert steps_in(tmp_path / "checkpoints")[-2:] == [8, 10]
    assert [why.split(":")[0] for why in decided(run, "not saved")] == ["step 4", "step 6"]
    assert "File too large" in decided(run, "not saved")[0]
    warnings = [m for m in caplog.messages if "could not be written, and the training goes on" in m]
    assert [m.split(" could")[0] for m in warnings] == ["the checkpoint of step 4", "the checkpoint of step 6"]
    assert not list((tmp_path / "checkpoints").glob(".t*"))
    assert Store(tmp_path / "checkpoints").latest()[1] == []


@pytest.mark.parametrize("background", [True, False])
def test_with_strict_a_failed_write_ends_the_run_and_what_was_there_stays(
    tmp_path: Path, no_large_files: Any, background: bool
) -> None:
    limit, lift = no_large_files
    saving = Checkpoint("2 steps", background=background, strict=True)
    trainer = tiny_trainer(
        model=wide_model(), optimizer=careful, steps=30, directory=tmp_path, callbacks=[between(3, 31, limit, lift), saving]
    )
    with pytest.raises(OSError, match="File too large"):
        trainer.fit()
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_a_best_that_could_not_be_written_is_not_the_best(tmp_path: Path, no_large_files: Any) -> None:
    limit, lift = no_large_files
    losses = iter([0.9, 0.5, 0.7, 0.8])

    class Scores:
        def update(self, *_: Any) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> float:
            return next(losses)

    evaluate = Evaluate(tiny_loader(1), metrics={"score": Scores()}, every="2 steps", compute=lambda model, batch: {
        "predictions": 0, "targets": 0})  # fmt: skip
    keep = Checkpoint("100 steps", keep_last=1, keep_best=("eval/score", "min"), background=False)
    callbacks = [between(3, 5, limit, lift), evaluate, keep]
    tiny_trainer(model=wide_model(), optimizer=careful, steps=8, directory=tmp_path, callbacks=callbacks).fit()
    assert bests(keep) == {"eval/score": ("step-00000006", 0.7)}  # that of step 4 was lost
    assert steps_in(tmp_path / "checkpoints") == [6, 8]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"only root can mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@pytest.mark.parametrize("inside", [False, True], ids=["checkpoints", "everything"])
def test_when_the_disk_is_full_the_training_goes_on_and_saves_when_there_is_room(
    tmp_path: Path, small_disk: Path, inside: bool
) -> None:
    directory = small_disk / "run" if inside else tmp_path / "run"
    folder = directory / "checkpoints" if inside else small_disk / "checkpoints"
    fault = between(3, 7, lambda: fill(small_disk), (small_disk / "ballast").unlink)
    saving = Checkpoint("2 steps", directory=None if inside else folder)
    callbacks = [fault, LogTraining("1 step"), saving]
    run = tiny_trainer(model=wide_model(), optimizer=careful, steps=10, directory=directory, callbacks=callbacks).fit()
    assert run.progress.step == 10
    assert steps_in(folder)[-2:] == [8, 10]
    assert [why.split(":")[0] for why in decided(run, "not saved")] == ["step 4", "step 6"]
    assert "No space left on device" in decided(run, "not saved")[0]
    assert Store(folder).latest()[1] == []


def test_when_the_disk_becomes_read_only_the_training_goes_on(tmp_path: Path, small_disk: Path) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", small_disk], check=True)

    fault = between(3, 7, lambda: remount("ro"), lambda: remount("rw"))
    saving = Checkpoint("2 steps", directory=small_disk / "checkpoints", background=False)
    run = tiny_trainer(
        model=wide_model(), optimizer=careful, steps=10, directory=tmp_path / "run", callbacks=[fault, saving]
    ).fit()
    assert steps_in(small_disk / "checkpoints") == [8, 10]
    assert len(decided(run, "not saved")) == 2
    assert "Read-only file system" in decided(run, "not saved")[0]


def test_when_the_folder_of_checkpoints_is_taken_away_the_training_goes_on(tmp_path: Path) -> None:
    folder, blocks = tmp_path / "checkpoints", list[Blocked]()
    fault = between(3, 7, lambda: blocks.append(Blocked(folder)), lambda: blocks[0].free())
    saving = Checkpoint("2 steps", background=False)
    run = tiny_trainer(steps=10, directory=tmp_path, callbacks=[fault, saving]).fit()
    assert steps_in(folder) == [8, 10]
    assert len(decided(run, "not saved")) == 2
    assert "FileExistsError" in decided(run, "not saved")[0]


# -- other processes ----------------------------------------------------------------------------------


def child(directory: Path) -> subprocess.Popen[str]:
    """Return a training with two loader workers that waits in its fifth step."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cadenza.__file__).parents[1])}
    command = [sys.executable, "-m", "tests.checkpoint.preempted", str(directory), "outside", str(int(signal.SIGTERM))]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def children_of(pid: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_cannot_have_one_directory_and_a_killed_one_blocks_no_other(tmp_path: Path) -> None:
    process = child(tmp_path)
    workers = children_of(process.pid)
    try:
        with pytest.raises(DirectoryError, match=rf"is in use by process {process.pid} on .*Wait for it, stop it, or give"):
            preempted.trainer(tmp_path).fit(resume="auto")
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # they live on when their parent is dead
        process.kill()
        process.wait()
        alive = [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        assert len(alive) == len(workers) == 2
        run = preempted.trainer(tmp_path).fit(resume="auto")
        assert run.progress.step == 36
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# -- callbacks that raise -----------------------------------------------------------------------------

MOMENTS = [moment for name, moment in moments_of(Callback).items() if name not in ("on_setup", "on_load")]


def final(*callbacks: Callback, directory: Path, resume: bool = False, steps: int = 7) -> Run:
    """Do a run with evaluation, accumulation and records."""
    common = [Evaluate(tiny_loader(2), sanity_batches=1), LogTraining("1 step", throughput=False), Checkpoint("1 step")]
    stop = on(Callback.on_step_end, at=steps)(lambda run: run.stop("enough"))
    return tiny_trainer(
        callbacks=[*callbacks, *common, stop], epochs=9, batches=6, accumulate=2, seed=1, directory=directory, optimizer=_adam
    ).fit(resume="auto" if resume else False)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


class Raising(Callback):
    """Raises at one moment, in the second epoch if that moment comes there."""

    def __init__(self, moment: Moment, on_fault: Any) -> None:
        self.moment, self.on_fault = moment, on_fault
        early = moment.__name__ in ("on_fit_start", "on_sanity_start", "on_sanity_end")
        self.from_step = 0 if early else 4
        self.raised = 0

    def listeners(self) -> list[Any]:
        return [cadenza.Listener(self.moment, self.fail)]

    def fail(self, run: Run, *_: Any) -> None:
        if run.progress.step >= self.from_step:
            self.raised += 1
            torch.rand(0)
            raise OSError("tracker down")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = final(directory=tmp_path_factory.mktemp("undisturbed") / "run")
    return {"model": dict(run.model.state_dict()), "eval": run.history["eval/loss"], "loss": run.history["train/loss"]}


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_callback_that_raises_and_is_disabled_changes_no_bit(
    tmp_path: Path, moment: Moment, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="cadenza")
    raising = Raising(moment, "disable")
    run = final(raising, directory=tmp_path)
    assert raising.raised == len(run.faults) == (moment is not Callback.on_exception)
    ends = {"model": dict(run.model.state_dict()), "eval": run.history["eval/loss"], "loss": run.history["train/loss"]}
    assert same(ends, undisturbed)


@pytest.mark.parametrize(
    "moment",
    [moment for moment in MOMENTS if moment not in (Callback.on_exception, Callback.on_fit_end, Callback.on_stop)],
    ids=lambda moment: moment.__name__,
)
def test_a_run_that_a_callback_ended_continues_without_it_to_the_same_bits(
    tmp_path: Path, moment: Moment, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="cadenza")
    with pytest.raises(OSError, match="tracker down"):
        final(Raising(moment, "raise"), directory=tmp_path)
    run = final(directory=tmp_path, resume=True)
    ends = {"model": dict(run.model.state_dict()), "eval": run.history["eval/loss"], "loss": run.history["train/loss"]}
    assert same(ends, undisturbed)
