"""JsonLines: records in a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import DirectoryError
from cadenza.sinks import JsonLines
from cadenza.testing import check_callback, tiny_run, tiny_trainer


@on(Callback.on_step_end)
def log_step(run: Run) -> None:
    run.log({"number": run.progress.step / 2, "odd": float("nan")})


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_relative_path_lies_in_the_directory_of_the_run(tmp_path: Path) -> None:
    tiny_run(callbacks=[log_step, JsonLines("deep/own.jsonl")], steps=2, directory=tmp_path)
    own = lines_of(tmp_path / "deep" / "own.jsonl")
    assert own == lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["number"], line["odd"]) for line in own] == [(1, 0.5, "NaN"), (2, 1.0, "NaN")]


def test_without_a_directory_it_lies_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(callbacks=[log_step, JsonLines("own.jsonl")], steps=2)
    assert len(lines_of(tmp_path / "own.jsonl")) == 2


def test_each_line_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    read: list[int] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        read.append(len(lines_of(tmp_path / "own.jsonl")))

    tiny_run(callbacks=[log_step, look, JsonLines(tmp_path / "own.jsonl")], steps=3)
    assert read == [0, 1, 2]


def test_the_last_records_are_there_however_the_run_ends(tmp_path: Path) -> None:
    @on(Callback.on_fit_end)
    def log(run: Run) -> None:
        run.log("late", 1)

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[JsonLines("own.jsonl"), log_step, log, fail], directory=tmp_path)
    assert [set(line) & {"number", "late"} for line in lines_of(tmp_path / "own.jsonl")] == [{"number"}, {"number", "late"}]


def test_one_instance_serves_several_runs(tmp_path: Path) -> None:
    sink = JsonLines("own.jsonl")
    for name in ("one", "two"):
        tiny_run(callbacks=[log_step, sink], steps=2, directory=tmp_path / name)
    assert len(lines_of(tmp_path / "one" / "own.jsonl")) == len(lines_of(tmp_path / "two" / "own.jsonl")) == 2


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("mine\n")
    with pytest.raises(DirectoryError, match=r"but the file exists and is not overwritten\. Give another path"):
        tiny_run(callbacks=[log_step, JsonLines(own)])
    assert own.read_text() == "mine\n"


def fit_for(directory: Path, *, killed_at: int = 100, every: str = "3 steps") -> None:
    @on(Callback.on_step_end, at=killed_at)
    def kill(run: Run) -> None:
        raise KeyboardInterrupt

    callbacks = [log_step, JsonLines("own.jsonl"), Checkpoint(every=every, on_exception=False), kill]
    tiny_trainer(callbacks=callbacks, steps=8, directory=directory).fit(resume="auto")


@pytest.mark.parametrize("every", ["3 steps", "100 steps"])  # with the second there is no checkpoint, and it starts anew
def test_a_run_that_is_continued_goes_on_in_its_file_after_its_checkpoint(tmp_path: Path, every: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit_for(tmp_path, killed_at=5, every=every)
    with (tmp_path / "own.jsonl").open("a") as file:
        file.write('{"epoch": 0, "st')  # as a kill leaves it
    fit_for(tmp_path, every=every)
    assert [line["step"] for line in lines_of(tmp_path / "own.jsonl")] == [*range(1, 9)]
    assert lines_of(tmp_path / "own.jsonl") == lines_of(tmp_path / "metrics.jsonl")


def test_a_file_of_others_is_not_touched_by_a_run_that_is_continued_either(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit_for(tmp_path, killed_at=4)
    (tmp_path / "own.jsonl").write_text("mine\n")
    with pytest.raises(DirectoryError, match="is not overwritten"):
        fit_for(tmp_path)
    assert (tmp_path / "own.jsonl").read_text() == "mine\n"


def test_the_file_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"metrics.jsonl' is the run's own file"):
        tiny_run(callbacks=[log_step, JsonLines("metrics.jsonl")], directory=tmp_path)


def test_a_path_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"JsonLines cannot write .*: .*Give a path where files can be made"):
        tiny_run(callbacks=[log_step, JsonLines(tmp_path / "file" / "own.jsonl")])


def test_it_keeps_the_contract_of_callbacks(tmp_path: Path) -> None:
    count = iter(range(10))
    check_callback(lambda: JsonLines(f"own{next(count)}.jsonl"))


def test_without_a_path_it_needs_the_directory_of_the_run() -> None:
    with pytest.raises(DirectoryError, match=r"JsonLines\(\) without a path .* but the run has no directory\. Give Trainer"):
        tiny_run(callbacks=[log_step, JsonLines()])
