"""``cadenza why``: the answer of `Run.why`, from the run's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.commands.main import main
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.going_on import going_on, kill, killed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("runs") / "one"
    run = tiny_run(
        epochs=9,
        directory=directory,
        callbacks=[Evaluate(tiny_loader()), EarlyStopping("eval/loss", mode="max", patience=1), Checkpoint()],
    )
    return directory, run.why("stopped")


def test_the_answer_is_that_of_the_run(stopped: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, answer = stopped
    for what in (["stopped"], [], ["EarlyStopping"]):
        assert main(["why", str(directory), *what]) == 0
        assert capsys.readouterr().out == f"{answer}\n"


def test_all_shows_each_decision_oldest_first(stopped: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(stopped[0]), "evaluated", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("evaluated by Evaluate at epoch 1, step 5")


def test_a_decision_that_was_not_taken_is_answered_with_those_that_were(
    stopped: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(stopped[0]), "stoped"]) == 1
    assert "nothing was 'stoped' in this run. Did you mean 'stopped'?" in capsys.readouterr().out


def test_json_holds_the_decision_with_its_data(stopped: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(stopped[0]), "stopped", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["outcome"]["kind"], found["answer"]) == ("stopped", "stopped", [stopped[1]])
    [decision] = found["decisions"]
    assert (decision["what"], decision["who"]) == ("stopped", "EarlyStopping")
    assert decision["data"]


def test_a_killed_run_has_no_outcome_and_the_last_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path, waits_after=4)
    for what in (["stopped"], ["killed"], []):
        assert main(["why", str(tmp_path), *what]) == 0
        told = capsys.readouterr().out
        assert "killed: no process holds the directory and run.json has no outcome; last record at 20" in told
        assert told.endswith("epoch 0, step 4, batch 4\n")
    assert main(["why", str(tmp_path), "finished"]) == 1
    assert capsys.readouterr().out.startswith("the run was not finished. It is killed")


def test_a_run_in_progress_was_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = going_on(tmp_path, 3)
    assert main(["why", str(tmp_path), "stopped"]) == 1
    assert capsys.readouterr().out.startswith("the run was not stopped. It is running: last record at ")
    kill(process)


def test_a_finished_run_was_not_stopped_by_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(directory=tmp_path)
    assert main(["why", str(tmp_path), "stopped"]) == 0
    assert capsys.readouterr().out == "the run was not stopped by a request. It is finished: the limit is reached\n"


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(tmp_path), "stopped"]) == 1
    assert capsys.readouterr().err.startswith(f"cadenza: {str(tmp_path)!r} is not a run directory")
