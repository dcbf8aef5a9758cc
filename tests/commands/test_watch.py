"""``cadenza watch``: runs in other processes, as a pipe and another program see them. For terminals see tests/alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.commands import watch as watch_command
from cadenza.commands.following import Following
from cadenza.files.locking import FolderLock
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.parts import Command, died, going_on, let_die
from tests.waiting import until


def finished(directory: Path) -> Path:
    stop = EarlyStopping("eval/loss", mode="max", patience=2)
    tiny_run(epochs=9, directory=directory, callbacks=[Evaluate(tiny_loader()), stop], seed=1)
    return directory


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("runs") / "over")


def seen(directory: Path, cadenza: Command, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cadenza("watch", directory, "--once", "--json", code=code).out)
    return found


def test_a_run_that_is_over_is_shown_once_with_its_end(over: Path, cadenza: Command) -> None:
    lines = cadenza("watch", over).out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [f"epoch {n}, step {5 * n}" for n in (1, 2, 3)]
    assert lines[3].startswith(f"{over}: stopped: 'eval/loss' did not get better")
    assert len(lines) == 4
    found = seen(over, cadenza)
    assert (found["state"], found["step"], found["steps"], found["epochs"]) == ("stopped", 15, 45, 9)
    assert found["fraction"] == pytest.approx(1 / 3)
    assert found["outcome"] == json.loads((over / "run.json").read_text())["outcome"]
    assert found["values"].keys() == found["best"].keys() == {"eval/loss"}


def after_the_first_update(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, when the command waits for its second update."""
    sleep = time.sleep

    def acting(seconds: float) -> None:
        monkeypatch.undo()
        act()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", acting)


def test_a_run_in_progress_is_followed_to_its_end_one_line_for_each_record(
    tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    found = seen(tmp_path, cadenza)
    assert (found["state"], found["step"], found["steps"]) == ("running", 4, 9)
    until(lambda: seen(tmp_path, cadenza)["checkpoints"])
    after_the_first_update(monkeypatch, (tmp_path / "go").touch)
    out = cadenza("watch", tmp_path, "--every", 0.05).out
    process.join(300)
    assert [int(number) for number in re.findall(r"step (\d+): number", out)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert out.endswith(f"{tmp_path}: finished: the limit is reached\n")
    assert "\x1b" not in out


def test_json_prints_a_line_for_each_update(tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    process = going_on(tmp_path, 4)
    after_the_first_update(monkeypatch, (tmp_path / "go").touch)
    updates = [json.loads(line) for line in cadenza("watch", tmp_path, "--every", 0.05, "--json").out.splitlines()]
    process.join(300)
    assert (updates[0]["state"], updates[0]["step"]) == ("running", 4)
    assert (updates[-1]["state"], updates[-1]["step"], updates[-1]["fraction"]) == ("finished", 9, 1.0)
    assert sum(one["records"] for one in updates) == len((tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_watch_notices_that_the_process_of_the_run_died_and_ends_with_1(
    tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    after_the_first_update(monkeypatch, lambda: let_die(tmp_path, process))
    for out in (cadenza("watch", tmp_path, "--every", 0.05, code=1).out, cadenza("watch", tmp_path, code=1).out):
        assert f"{tmp_path}: killed: no process holds the directory and run.json has no outcome" in out
    assert seen(tmp_path, cadenza, code=1)["state"] == "killed"


def test_a_continued_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    died(tmp_path, waits_after=5)
    run = Following(tmp_path)
    assert [record.step for record in run.update()][-1] == 5
    process = going_on(tmp_path, 6)
    until(lambda: run.update() and run.state == "running")
    assert run.story.reached.step == 6
    assert list(run.story.series["number"].steps) == [1, 2, 3, 4, 5, 6]
    rates = run.rates()
    assert rates is None or rates[0] < 1000  # the pause before the resume does not count
    let_die(tmp_path, process)


def test_a_run_without_files_yet_is_starting(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    run = Following(tmp_path)
    run.update()
    assert run.state == "starting"
    assert watch_command.lines(run, 60, 24)[0] == f"{tmp_path.name}: starting, epoch 0, step 0"
    lock.release()


def test_a_wrong_interval_is_an_error(over: Path, cadenza: Command) -> None:
    told = cadenza("watch", over, "--every", "nan", code=1).err
    assert told == "cadenza: --every must be at least 0.05 seconds; got nan\n"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal_and_shows_the_values_first(over: Path, columns: int) -> None:
    run = Following(over)
    run.update()
    lines = watch_command.lines(run, columns, 24)
    assert max(map(len, lines)) <= columns
    assert lines[0] == "over: stopped, epoch 3 of 9, step 15 of 45"
    assert lines[1].endswith("] 33%")
    [row] = [line for line in lines if line.startswith("eval/loss")]
    assert "█" in row
    assert len(watch_command.lines(run, columns, 8)) <= 8
