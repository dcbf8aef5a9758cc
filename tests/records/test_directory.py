"""The run directory: readable while the run goes on, never overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import LogTraining
from cadenza.errors import DirectoryError
from cadenza.records.directory import RunDirectory
from cadenza.sinks import JsonLines
from cadenza.testing import tiny_run, tiny_trainer


def facts_in(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    return facts


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_run_json_says_what_was_run_how_and_how_it_ended(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "run", seed=3, callbacks=[LogTraining()], epochs=2)
    facts = facts_in(tmp_path / "run")
    assert facts["command"] == [sys.executable, *sys.argv]
    assert facts["seed"] == 3
    assert facts["device"] == "cpu"
    assert facts["arguments"]["model"] == "Linear, 2 parameters"
    assert facts["arguments"]["max_epochs"] == 2
    assert facts["arguments"]["callbacks"] == ["LogTraining"]
    assert set(facts["versions"]) == {"cadenza", "torch", "python", "platform"}
    assert facts["outcome"] == {"kind": "finished", "reason": "the limit is reached"}
    assert facts["started"] <= facts["ended"]
    assert "git_commit" in facts


def git(folder: Path, *arguments: str) -> str:
    named = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    return subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_run_json_names_the_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv("GIT_DIR")

    def commit_told(run: str) -> str | None:
        tiny_run(directory=tmp_path / run, steps=1)
        told: str | None = facts_in(tmp_path / run)["git_commit"]
        return told

    assert commit_told("outside of git") is None
    git(inner.parent, "init")
    assert commit_told("nothing committed yet") is None
    (inner / "train.py").write_text("first")
    git(inner.parent, "add", ".")
    git(inner.parent, "commit", "-m", "first")
    commit = git(inner.parent, "rev-parse", "HEAD")
    (inner / "untracked.py").write_text("not counted")
    assert commit_told("as committed") == commit
    (inner / "train.py").write_text("second")
    assert commit_told("changed") == f"{commit}+"


def test_while_the_run_goes_on_everything_can_be_read_with_a_line_for_each_record_at_once(tmp_path: Path) -> None:
    states: list[tuple[Any, int]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        metrics = tmp_path / "metrics.jsonl"
        states.append((facts_in(tmp_path)["outcome"], len(lines_of(metrics)) if metrics.exists() else 0))

    log = LogTraining(every="1 step", throughput=False)
    run = tiny_run(directory=tmp_path, callbacks=[JsonLines(), log, look], steps=3)
    assert states == [(None, 0), (None, 1), (None, 2)]
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["train/loss"]) for line in lines] == run.history["train/loss"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", [Callback.on_setup, Callback.on_fit_start, Callback.on_step_end, Callback.on_fit_end])
def test_a_run_that_failed_says_so_wherever_it_failed(tmp_path: Path, error: BaseException, moment: Any) -> None:
    def fail(run: Run) -> None:
        raise type(error)(*error.args)

    with pytest.raises(type(error)):
        tiny_run(directory=tmp_path, callbacks=[on(moment)(fail)])
    assert facts_in(tmp_path)["outcome"] == {"kind": "failed", "reason": repr(error)}
    assert facts_in(tmp_path)["ended"]


def test_a_run_that_was_stopped_says_so_and_its_decisions_are_written_with_who_why_and_when(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[on(Callback.on_step_end)(lambda run: run.stop("enough"))])
    assert facts_in(tmp_path)["outcome"] == {"kind": "stopped", "reason": "enough"}
    assert lines_of(tmp_path / "decisions.jsonl") == [decision.to_dict() for decision in run.decisions]
    stopped = lines_of(tmp_path / "decisions.jsonl")[0]
    assert (stopped["what"], stopped["who"], stopped["why"], stopped["step"]) == ("stopped", "<lambda>", "enough", 1)


def test_what_the_user_is_told_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Speaking(Callback):
        def on_fit_start(self, run: Run) -> None:
            run.print("hello")
            run.warn("careful")

    tiny_run(directory=tmp_path, callbacks=[Speaking()])
    assert (tmp_path / "console.log").read_text(encoding="utf-8") == "hello\ncareful\n"
    assert capsys.readouterr().out == "hello\n"


def test_a_directory_that_holds_a_finished_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    trainer = tiny_trainer(directory=tmp_path, callbacks=[LogTraining(every="1 step")])
    trainer.fit()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        DirectoryError, match=r"already holds a run that finished at .*nothing is overwritten\. Continue it with fit"
    ):
        trainer.fit()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_in_which_a_run_goes_on_is_refused_too_and_one_that_holds_other_things_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    @on(Callback.on_step_end, at=1)
    def second(run: Run) -> None:
        with pytest.raises(DirectoryError, match="already holds a run started at"):
            tiny_run(directory=tmp_path)

    assert tiny_run(directory=tmp_path, callbacks=[second]).outcome is not None
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("inner", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_is_an_error_before_anything_happens(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("in the way")
    happened: list[int] = []
    note = on(Callback.on_setup)(lambda run: happened.append(1))
    message = r"cannot be written: .*Give a directory= in which files can be made, or none"
    with pytest.raises(DirectoryError, match=message) as refused:
        tiny_run(directory=tmp_path / inner, callbacks=[note])
    assert happened == []
    assert isinstance(refused.value, OSError)


def test_a_run_that_is_over_stays_over_until_a_checkpoint_is_restored(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=2)
    ended = facts_in(tmp_path)
    killed = RunDirectory(tmp_path, resume=True)
    killed.begin({})
    told = facts_in(tmp_path)
    assert all(told[name] == ended[name] for name in ("outcome", "ended", "progress"))
    killed.goes_on()
    told = facts_in(tmp_path)
    assert (told["outcome"], told["ended"], "progress" in told) == (None, None, False)
    killed.release()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 7),
        ("branch", "main"),
        ("branch", {"branch": "x", "ancestors": []}),
        ("branch", {"branch": 0, "ancestors": [], "resumed_at": 3}),
        ("outcome", "finished"),
        ("outcome", {"kind": 1, "reason": ""}),
        ("outcome", {}),
        ("progress", [1]),
        ("progress", {"step": "many"}),
        ("progress", {"stride": 3}),
        ("continued", "often"),
        ("started", 17),
    ],
)
def test_a_run_json_with_a_field_of_another_kind_is_an_error_that_names_it(tmp_path: Path, field: str, value: Any) -> None:
    tiny_run(directory=tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**facts_in(tmp_path), field: value}), encoding="utf-8")
    before = sorted(path.name for path in tmp_path.iterdir())
    for resume in (False, "auto", "best"):
        with pytest.raises(DirectoryError, match=r"holds a run.json that Cadenza cannot read \(.*\)\. Give another directory="):
            tiny_trainer(directory=tmp_path).fit(resume=resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
