"""A relative path means the working directory in which the object was made, also when the script changes it later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cadenza import Callback, Run, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining, Profile, SavePredictions
from cadenza.sinks import Csv, JsonLines
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return two folders; the first is the working directory."""
    made, later = tmp_path / "made", tmp_path / "later"
    made.mkdir()
    later.mkdir()
    monkeypatch.chdir(made)
    return made, later


def test_a_run_writes_to_one_directory_although_the_script_goes_elsewhere(folders: tuple[Path, Path]) -> None:
    made, later = folders
    move = on(Callback.on_step_end, at=2)(lambda run: os.chdir(later))
    trainer = tiny_trainer(directory="run", callbacks=[LogTraining("1 step"), move, Checkpoint("2 steps"), Csv()], steps=5)
    os.chdir(later)
    run = trainer.fit()
    assert run.info.directory == trainer.directory == made / "run"
    assert [*later.iterdir()] == []
    assert len((made / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert len([*(made / "run" / "checkpoints").glob("step-*")]) == 2
    assert trainer.fit(resume="auto").progress.step == 5  # it finds the run that is over


def test_without_a_directory_paths_of_callbacks_start_where_the_trainer_was_made(folders: tuple[Path, Path]) -> None:
    made, later = folders
    callbacks: list[Callback] = [
        LogTraining("1 step"),
        Evaluate(tiny_loader(1)),
        Checkpoint(directory="saved"),
        Csv("table.csv"),
        JsonLines("lines.jsonl"),
        Profile(trace="trace.json", window=(0, 2)),
        SavePredictions("predictions.csv", evaluation="eval", columns={"prediction": lambda batch, outputs: batch[1]}),
    ]
    trainer = tiny_trainer(callbacks=callbacks, compute_loss=supervised(lambda out, y: ((out - y) ** 2).mean()), batches=2)
    os.chdir(later)
    trainer.fit()
    assert [*later.iterdir()] == []
    assert {path.name for path in made.iterdir()} == {"saved", "table.csv", "lines.jsonl", "trace.json", "predictions.csv"}


def test_a_url_is_no_directory_of_a_run_and_one_for_checkpoints_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"must be a local folder; got the URL 's3://bucket/run'\. Give a local"):
        tiny_trainer(directory="s3://bucket/run")
    assert Checkpoint(directory="memory://bucket/run").directory == "memory://bucket/run"


def test_a_working_directory_that_is_gone_does_not_matter_to_an_absolute_path(folders: tuple[Path, Path]) -> None:
    made, later = folders
    os.chdir(later)
    later.rmdir()
    run: Run = tiny_run(directory=made / "run", callbacks=[Checkpoint()], steps=1)
    assert run.outcome is not None
