"""A run survives its disk and its callbacks: saved checkpoints stay, failed saves are repeated, and errors are reported."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.checkpoint import writer
from cadenza.checkpoint.store import Store
from cadenza.errors import CheckpointLostError, DirectoryError, MissingExtraError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment, moments_of
from cadenza.sinks.sink import Sink
from cadenza.status.encoding import same
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import bests, decided
from tests.checkpoint.blocked import Blocked
from tests.checkpoint.store.contents import latest
from tests.waiting import until


def steps_in(folder: Path) -> list[int]:
    return [saved.step for saved in Store(folder).saved()]


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pauses be short."""
    monkeypatch.setattr(writer, "PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(writer, "LAST_PAUSES_S", (0.01, 0.01))


# -- before the first step -----------------------------------------------------------------------------


def refused(folder: Path | str | None, directory: Path) -> str:
    """Return the error of a run that cannot write its checkpoints there; it does no step."""
    steps: list[int] = []
    count = on(Callback.on_step_start)(lambda run: steps.append(run.progress.step))
    with pytest.raises(DirectoryError) as raised:
        tiny_run(callbacks=[count, Checkpoint(directory=folder)], directory=directory, steps=2)
    assert steps == []
    return str(raised.value)


def mount(folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", *options, "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"only root can mount a small file system: {done.stderr.strip()}")


def test_a_file_instead_of_the_folder_of_checkpoints_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = refused(tmp_path / "file" / "below", tmp_path / "run")
    assert "checkpoints cannot be written to" in said
    assert "Give Checkpoint(directory=) a folder or URL" in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]["kind"] == "failed"
    assert "checkpoints cannot be written to" in refused(f"file://{tmp_path}/file/below", tmp_path / "remote")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "checkpoints").write_text("in the way")
    assert "checkpoints cannot be written to" in refused(None, tmp_path / "beside")


def test_an_immutable_folder_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    """Nothing can be made in it, not even by root."""
    folder = tmp_path / "immutable"
    folder.mkdir()
    try:
        done = subprocess.run(["chattr", "+i", folder], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no chattr")
    if done.returncode:
        pytest.skip(f"a folder cannot be made immutable here: {done.stderr.strip()}")
    try:
        assert "checkpoints cannot be written to" in refused(folder, tmp_path / "run")
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


def test_a_full_disk_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "size=16k")
    try:
        with (disk / "large").open("wb") as file, pytest.raises(OSError, match="No space"):
            file.write(b"0" * 100_000)
        assert "No space left on device" in refused(disk, tmp_path / "run")
        assert [path.name for path in disk.iterdir()] == ["large"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_url_that_nothing_here_can_reach_is_an_error_when_it_is_given_and_the_trial_of_another_leaves_nothing(
    tmp_path: Path,
) -> None:
    seen: list[Path] = []
    look = on(Callback.on_fit_start)(lambda run: seen.extend((tmp_path / "saved").iterdir()))
    tiny_run(callbacks=[Checkpoint("100 steps", directory=f"file://{tmp_path}/saved"), look], steps=1)
    assert seen == []
    with pytest.raises(ValueError, match=r"fsspec cannot reach 'nowhere://bucket': Protocol not known: nowhere\. Give a local"):
        Checkpoint(directory="nowhere://bucket")
    try:
        import s3fs  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"needs the package 's3fs', which is not installed"):
            Checkpoint(directory="s3://bucket/run")


WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
from cadenza import Callback, on
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_run
steps = []
try:
    tiny_run(callbacks=[on(Callback.on_step_start)(steps.append), Checkpoint()], directory=sys.argv[1], steps=2)
except ImportError as error:
    print(len(steps), error)
tiny_run(steps=2, seed=1)
print("trained")
"""


def test_what_a_checkpoint_needs_is_declared_and_without_numpy_it_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "0 Checkpoint needs the package 'numpy', which is not installed. Install it with: pip install numpy"
    assert second == "trained"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in project.splitlines() if line.startswith("dependencies"))
    assert all(f'"{package}' in line for package in ("torch", "safetensors", "numpy", "fsspec"))


# -- while it goes on ----------------------------------------------------------------------------------


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


def blocked_between(first: int, last: int, folder: Path) -> Callback:
    """Return a callback that has a file in the place of a folder, then waits until a checkpoint is in that folder."""
    blocks: list[Blocked] = []

    def free() -> None:
        blocks[0].free()
        until(lambda: steps_in(folder))

    return between(first, last, lambda: blocks.append(Blocked(folder)), free)


def scored(*values: float) -> Evaluate:
    """Return an evaluation every 2 steps that has these results."""
    left = iter(values)

    class Score:
        def update(self, *_: Any) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> float:
            return next(left)

    output = {"predictions": torch.zeros(1), "targets": torch.zeros(1)}
    return Evaluate(tiny_loader(1), metrics={"score": Score()}, every="2 steps", compute=lambda model, batch: output)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_is_tried_again_before_the_next_one(
    tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, seen = tmp_path / "checkpoints", list[list[int]]()
    look = on(Callback.on_step_end, at=4)(lambda run: seen.append(steps_in(folder)))
    callbacks = [blocked_between(1, 4, folder), look, Checkpoint("2 steps", background=background)]
    run = tiny_trainer(directory=tmp_path, callbacks=callbacks, steps=6).fit()
    assert seen == [[2]]  # between its interval and the next one
    assert steps_in(folder) == [4, 6]
    assert [why.split(":")[0] for why in decided(run, "not saved")] == ["step 2"]
    assert decided(run, "saved")[0].startswith("step-00000002: every 2 steps, at attempt ")
    assert any("is tried again until the next save" in message for message in caplog.messages)
    assert not list(folder.glob(".t*"))


@pytest.mark.usefixtures("quickly")
def test_a_best_that_a_later_attempt_writes_is_the_best_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    keep = Checkpoint("100 steps", keep_last=1, keep_best=("eval/score", "min"))
    callbacks = [blocked_between(1, 3, folder), scored(0.5, 0.7, 0.8), keep]
    tiny_trainer(directory=tmp_path, callbacks=callbacks, steps=6).fit()
    assert bests(keep) == {"eval/score": ("step-00000002", 0.5)}
    assert steps_in(folder) == [2, 6]


# -- at the end ----------------------------------------------------------------------------------------


class Outcomes(Sink):
    """Keeps the outcomes that sinks get."""

    kinds: list[str]

    def open(self, facts: object) -> None:
        self.kinds = []

    def write(self, records: object) -> None: ...

    def close(self, outcome: Any) -> None:
        self.kinds.append(outcome.kind)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("end", ["limit", "stop"])
def test_a_run_without_its_last_checkpoint_is_a_failed_run_and_goes_on_from_the_one_before(tmp_path: Path, end: str) -> None:
    folder, blocks = tmp_path / "checkpoints", list[Blocked]()
    block = on(Callback.on_step_end, at=3)(lambda run: blocks.append(Blocked(folder)))
    stop = on(Callback.on_step_end, at=4)(lambda run: run.stop("enough") if end == "stop" else None)
    sinks = [Outcomes(), Outcomes()]
    trainer = tiny_trainer(
        directory=tmp_path,
        callbacks=[sinks[0], Checkpoint("2 steps", background=False), sinks[1], block, stop],
        steps=4,
        seed=0,
    )
    with pytest.raises(CheckpointLostError, match=r"of step 4, could not be written to .*checkpoints in \d attempts: File"):
        trainer.fit()
    outcome = json.loads((tmp_path / "run.json").read_text())["outcome"]
    assert outcome["kind"] == "failed"
    assert "CheckpointLostError" in outcome["reason"]
    assert [sink.kinds for sink in sinks] == [["failed"], ["failed"]]
    blocks[0].free()
    run = tiny_trainer(directory=tmp_path, callbacks=[Checkpoint("2 steps")], steps=4, seed=0).fit(resume="auto")
    assert (run.progress.origin.step, run.progress.step) == (2, 4)
    assert steps_in(folder) == [2, 4]


@pytest.mark.usefixtures("quickly")
def test_a_last_save_that_succeeds_at_a_later_attempt_is_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, blocks = tmp_path / "checkpoints", list[Blocked]()

    class Pauses:
        def __iter__(self) -> Iterator[float]:
            blocks.pop().free()
            yield 0.01

    monkeypatch.setattr(writer, "LAST_PAUSES_S", Pauses())
    block = on(Callback.on_step_end, at=3)(lambda run: blocks.append(Blocked(folder)))
    run = tiny_trainer(directory=tmp_path, callbacks=[block, Checkpoint("2 steps", background=False)], steps=4).fit()
    assert (run.outcome and run.outcome.kind) == "finished"
    assert steps_in(folder) == [2, 4]


@pytest.mark.usefixtures("quickly")
def test_the_error_of_the_training_stays_the_first_and_the_lost_save_is_noted(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=3)
    def fail(run: Run) -> None:
        Blocked(tmp_path / "checkpoints")
        raise RuntimeError("the training's own")

    with pytest.raises(RuntimeError, match="the training's own") as raised:
        tiny_trainer(directory=tmp_path, callbacks=[fail, Checkpoint("2 steps")], steps=4).fit()
    assert any("CheckpointLostError" in note for note in raised.value.__notes__)


# -- faults of the disk --------------------------------------------------------------------------------

Fault = tuple[Callable[[], object], Callable[[], object]]
"""What begins a fault, and what ends it."""


def wide(**arguments: Any) -> Trainer:
    """Return a trainer of a model of 60 kB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 5000), nn.Linear(5000, 1))
    return tiny_trainer(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6), **arguments)


@pytest.fixture
def no_large_files() -> Iterator[Fault]:
    """Return functions that limit the size of files to 20 kB, and lift the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)), lift
    lift()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "size=1m")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("no large files", "File too large"),
        ("full", "No space left on device"),
        ("full with the records", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("taken away", "FileExistsError"),
    ],
)
def test_while_checkpoints_cannot_be_written_the_training_goes_on_and_the_next_save_succeeds(
    tmp_path: Path, request: pytest.FixtureRequest, fault: str, error: str, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk = fault.startswith(("full", "read"))
    disk: Path = request.getfixturevalue("small_disk") if on_disk else tmp_path
    directory = disk / "run" if fault == "full with the records" else tmp_path / "run"
    folder = disk / "checkpoints" if fault in ("full", "read-only") else directory / "checkpoints"
    blocks: list[Blocked] = []
    faults: dict[str, Callable[[], Fault]] = {
        "no large files": lambda: request.getfixturevalue("no_large_files"),
        "full": lambda: (lambda: fill(disk), (disk / "ballast").unlink),
        "full with the records": lambda: (lambda: fill(disk), (disk / "ballast").unlink),
        "read-only": lambda: (lambda: remount(disk, "ro"), lambda: remount(disk, "rw")),
        "taken away": lambda: (lambda: blocks.append(Blocked(folder)), lambda: blocks[0].free()),
    }
    seen: list[list[int]] = []
    look = on(Callback.on_step_end, at=6)(lambda run: seen.append(steps_in(folder)))
    saving = Checkpoint("2 steps", directory=folder, background=background)
    callbacks = [between(3, 7, *faults[fault]()), LogTraining("1 step"), look, saving]
    run = wide(steps=10, directory=directory, callbacks=callbacks).fit()
    assert run.progress.step == 10
    assert seen == [[] if fault == "taken away" else [2]]
    assert steps_in(folder) == [8, 10]
    assert [why.split(":")[0] for why in decided(run, "not saved")] == ["step 4", "step 6"]
    assert error in decided(run, "not saved")[0]
    warnings = [m for m in caplog.messages if "could not be written, and the training goes on" in m]
    assert [m.split(" could")[0] for m in warnings] == ["the checkpoint of step 4", "the checkpoint of step 6"]
    assert not list(folder.glob(".t*"))
    assert latest(Store(folder))[1] == []


# -- callbacks that raise -----------------------------------------------------------------------------

MOMENTS = [moment for name, moment in moments_of(Callback).items() if name not in ("on_setup", "on_load")]


def final(*callbacks: Callback, directory: Path, resume: bool = False) -> Run:
    """Do a run with evaluation, accumulation and records."""
    common = [Evaluate(tiny_loader(2), sanity_batches=1), LogTraining("1 step", throughput=False), Checkpoint("1 step")]
    stop = on(Callback.on_step_end, at=7)(lambda run: run.stop("enough"))
    return tiny_trainer(
        callbacks=[*callbacks, *common, stop],
        epochs=9,
        batches=6,
        accumulate=2,
        seed=1,
        directory=directory,
        optimizer=partial(torch.optim.Adam, lr=0.1),
    ).fit(resume="auto" if resume else False)


def end_of(run: Run) -> dict[str, Any]:
    return {"model": dict(run.model.state_dict()), "eval": run.history["eval/loss"], "loss": run.history["train/loss"]}


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
    return end_of(final(directory=tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_callback_that_raises_and_is_disabled_changes_no_bit(
    tmp_path: Path, moment: Moment, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="cadenza")
    raising = Raising(moment, "disable")
    run = final(raising, directory=tmp_path)
    assert raising.raised == len(run.faults) == (moment is not Callback.on_exception)
    assert same(end_of(run), undisturbed)


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
    assert same(end_of(run), undisturbed)
