"""A folder that cannot be written is an error before the first step; one that fails later is tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.checkpoint import attempts
from cadenza.checkpoint.store import Store
from cadenza.errors import CheckpointLostError, DirectoryError, MissingExtraError
from cadenza.sinks.sink import Sink
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import bests
from tests.checkpoint.blocked import Blocked
from tests.waiting import until


def steps_in(folder: Path) -> list[int]:
    return [saved.step for saved in Store(folder).saved()]


def decided(run: Run, what: str) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == what]


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pauses be short."""
    monkeypatch.setattr(attempts, "PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(attempts, "LAST_PAUSES_S", (0.01, 0.01))


# -- before the first step -----------------------------------------------------------------------------


def refused(folder: Path | str, directory: Path, error: type[Exception] = DirectoryError) -> str:
    """Return the error of a run that cannot write its checkpoints there; it does no step."""
    steps: list[int] = []
    count = on(Callback.on_step_start)(lambda run: steps.append(run.progress.step))
    with pytest.raises(error) as raised:
        tiny_run(callbacks=[count, Checkpoint(directory=folder)], directory=directory, steps=2)
    assert steps == []
    return str(raised.value)


def test_a_file_instead_of_the_folder_of_checkpoints_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    told = refused(tmp_path / "checkpoints" / "below", tmp_path / "run")
    assert "checkpoints cannot be written to" in told
    assert "Give Checkpoint(directory=) a folder or URL" in told
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]["kind"] == "failed"
    run = tmp_path / "run2"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    with pytest.raises(DirectoryError, match="checkpoints cannot be written to"):
        tiny_run(callbacks=[Checkpoint()], directory=run, steps=2)


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in which nothing can be made, not even by root."""
    folder = tmp_path / "immutable"
    folder.mkdir()
    try:
        done = subprocess.run(["chattr", "+i", folder], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no chattr")
    if done.returncode:
        pytest.skip(f"a folder cannot be made immutable here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["chattr", "-i", folder], check=True)


def test_an_immutable_folder_is_an_error_before_the_first_step(immutable: Path, tmp_path: Path) -> None:
    assert "checkpoints cannot be written to" in refused(immutable, tmp_path / "run")


def test_a_full_disk_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        with (disk / "large").open("wb") as file, pytest.raises(OSError, match="No space"):
            file.write(b"0" * 100_000)
        assert "No space left on device" in refused(disk, tmp_path / "run")
        assert [path.name for path in disk.iterdir()] == ["large"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_url_of_fsspec_is_tried_too_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "checkpoints cannot be written to" in refused(f"file://{tmp_path}/file/below", tmp_path / "run")
    kept = Checkpoint("100 steps", directory=f"file://{tmp_path}/saved")
    tiny_run(callbacks=[kept, on(Callback.on_fit_start)(lambda run: seen.extend((tmp_path / "saved").iterdir()))], steps=1)
    assert seen == []


seen: list[Path] = []


def test_a_url_that_nothing_here_can_reach_is_an_error_when_it_is_given() -> None:
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


def test_without_numpy_a_run_with_checkpoints_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path)], capture_output=True, text=True, check=True, env={**os.environ}
    )
    first, second = done.stdout.splitlines()
    assert first == "0 Checkpoint needs the package 'numpy', which is not installed. Install it with: pip install numpy"
    assert second == "trained"


def test_what_a_checkpoint_needs_is_declared() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in project.splitlines() if line.startswith("dependencies"))
    assert all(f'"{package}' in line for package in ("torch", "safetensors", "numpy", "fsspec"))


# -- while it goes on ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_is_tried_again_before_the_next_one(
    tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    seen: list[list[int]] = []

    class Fault(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.progress.step == 1:
                self.blocked = Blocked(folder)
            if run.progress.step == 4:
                until(lambda: not saving.writer.attempts.busy)  # the first attempt has failed
                self.blocked.free()
                until(lambda: steps_in(folder))
                seen.append(steps_in(folder))

    saving = Checkpoint("2 steps", background=background)
    run = tiny_trainer(directory=tmp_path, callbacks=[Fault(), saving], steps=6).fit()
    assert seen == [[2]]  # between its interval and the next one
    assert steps_in(folder) == [4, 6]
    assert [why.split(":")[0] for why in decided(run, "not saved")] == ["step 2"]
    assert decided(run, "saved")[0].startswith("step-00000002: every 2 steps, at attempt ")
    assert any("is tried again until the next save" in message for message in caplog.messages)
    assert not list(folder.glob(".t*"))


@pytest.mark.usefixtures("quickly")
def test_a_best_that_a_later_attempt_writes_is_the_best_again(tmp_path: Path) -> None:
    folder, losses = tmp_path / "checkpoints", iter([0.5, 0.7, 0.8])

    class Score:
        def update(self, *_: Any) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> float:
            return next(losses)

    class Fault(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.progress.step == 1:
                self.blocked = Blocked(folder)
            if run.progress.step == 3:
                until(lambda: not keep.writer.attempts.busy)  # the first attempt has failed
                self.blocked.free()
                until(lambda: steps_in(folder))

    evaluate = Evaluate(
        tiny_loader(1),
        metrics={"score": Score()},
        every="2 steps",
        compute=lambda model, batch: {"predictions": torch.zeros(1), "targets": torch.zeros(1)},
    )
    keep = Checkpoint("100 steps", keep_last=1, keep_best=("eval/score", "min"))
    tiny_trainer(directory=tmp_path, callbacks=[Fault(), evaluate, keep], steps=6).fit()
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

    monkeypatch.setattr(attempts, "LAST_PAUSES_S", Pauses())
    block = on(Callback.on_step_end, at=3)(lambda run: blocks.append(Blocked(folder)))
    run = tiny_trainer(directory=tmp_path, callbacks=[block, Checkpoint("2 steps", background=False)], steps=4).fit()
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
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
