"""``cadenza watch`` and ``cadenza replay``: commands that follow runs in other processes. For terminals see tests/alone."""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cadenza import Callback, Run, Text, on
from cadenza.callbacks import Alert, EarlyStopping, Evaluate, LogTraining
from cadenza.files.locking import FolderLock
from cadenza.records.reading import NewRecords
from cadenza.report.commands import directories
from cadenza.report.commands import replay as replay_command
from cadenza.report.commands import watch as watch_command
from cadenza.report.commands.following import FollowedRuns, Following
from cadenza.sinks import Csv, TensorBoard
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


def test_a_run_that_is_over_is_shown_once_with_its_end_and_a_wrong_interval_is_an_error(over: Path, cadenza: Command) -> None:
    lines = cadenza("watch", over).out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [f"epoch {n}, step {5 * n}" for n in (1, 2, 3)]
    assert lines[3].startswith(f"{over}: stopped: 'eval/loss' did not get better")
    assert len(lines) == 4
    found = seen(over, cadenza)
    assert (found["state"], found["step"], found["steps"], found["epochs"]) == ("stopped", 15, 45, 9)
    assert found["fraction"] == pytest.approx(1 / 3)
    assert found["outcome"] == json.loads((over / "run.json").read_text())["outcome"]
    assert found["values"].keys() == found["best"].keys() == {"eval/loss"}
    told = cadenza("watch", over, "--every", "nan", code=1).err
    assert told == "cadenza: --every must be at least 0.05 seconds; got nan\n"


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


# -- replay: a run's records taken to a sink afterwards, or while it goes on; for trackers see tests/sinks ---


@on(Callback.on_step_end)
def log_number(run: Run) -> None:
    run.log({"number": run.progress.step / 2, "odd": float("nan"), "note": Text("only words")})


@pytest.fixture
def with_table(tmp_path: Path) -> Path:
    """A run that is over, and wrote a table of its own."""
    tiny_run(callbacks=[log_number, Csv("own.csv")], steps=5, directory=tmp_path / "over", seed=1)
    return tmp_path / "over"


def steps_in(table: Path) -> list[int]:
    with table.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "metrics.csv"}


def test_every_record_of_a_run_that_is_over_gets_there_as_the_run_would_have_written_it(
    with_table: Path, cadenza: Command
) -> None:
    before = files_of(with_table)
    told = cadenza("replay", with_table, "--to", "csv").out
    assert told == f"5 records of {with_table} are in csv now; pictures, sounds and texts are not in metrics.jsonl\n"
    assert steps_in(with_table / "metrics.csv") == [1, 2, 3, 4, 5]
    assert (with_table / "metrics.csv").read_text() == (with_table / "own.csv").read_text()
    assert files_of(with_table) == before


def test_tensorboard_shows_what_the_run_would_have_shown(with_table: Path, tmp_path: Path, cadenza: Command) -> None:
    cadenza("replay", with_table, "--to", "tensorboard", "--output", tmp_path / "elsewhere")
    events = EventAccumulator(str(tmp_path / "elsewhere")).Reload().Scalars("number")
    times = [json.loads(line)["time"] for line in (with_table / "metrics.jsonl").read_text().splitlines()]
    assert [(event.step, event.value, round(event.wall_time, 3)) for event in events] == [
        (step, step / 2, when) for step, when in enumerate(times, 1)
    ]


def test_what_a_kill_cut_is_left_out_and_what_cannot_be_read_is_told(with_table: Path, cadenza: Command) -> None:
    with (with_table / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"epoch": 0, "st')
    told = cadenza("replay", with_table, "--to", "csv").out
    assert steps_in(with_table / "metrics.csv") == [1, 2, 3, 4, 5]
    assert told.endswith("1 lines of metrics.jsonl cannot be read, and are left out\n")


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_nothing_is_added_to_what_the_run_itself_wrote(tmp_path: Path, name: str, cadenza: Command) -> None:
    tiny_run(callbacks=[log_number, TensorBoard(), Csv()], steps=2, directory=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = cadenza("replay", tmp_path, "--to", name, code=1).err
    assert "exists already, perhaps written by the run itself" in told
    assert "Give another --output" in told
    usual = tmp_path / replay_command.TARGETS[name].usual
    told = cadenza("replay", tmp_path, "--to", name, "--output", usual, code=1).err
    assert "replay never overwrites. Give another --output" in told
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_with_follow_it_goes_on_until_the_run_has_ended(
    tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    monkeypatch.setattr(replay_command, "_POLL_S", 0.05)

    def let_go_when_all_is_there() -> None:
        table = tmp_path / "metrics.csv"
        until(lambda: table.exists() and sorted({*steps_in(table)}) == [1, 2, 3, 4])
        (tmp_path / "go").touch()

    other = threading.Thread(target=let_go_when_all_is_there, daemon=True)
    other.start()
    cadenza("replay", tmp_path, "--to", "csv", "--follow")
    process.join(300)
    other.join(200)
    assert process.exitcode == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert steps_in(tmp_path / "metrics.csv") == [json.loads(line)["step"] for line in lines]
    assert {*steps_in(tmp_path / "metrics.csv")} == {*range(1, 10)}


def test_follow_ends_when_the_process_of_the_run_died(tmp_path: Path, cadenza: Command) -> None:
    died(tmp_path, waits_after=4)
    count = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    told = cadenza("replay", tmp_path, "--to", "csv", "--follow").out
    assert told.startswith(f"{count} records of {tmp_path} are in csv now")


def test_a_run_that_is_continued_repeats_no_step_for_who_follows(tmp_path: Path) -> None:
    def lines(steps: range, odd: str = "") -> str:
        counters = '{{"epoch": 0, "step": {0}, "batch": {0}, "samples": {0}, "time": 1.5, "a": {0}{1}}}\n'
        return "".join(counters.format(step, odd) for step in steps)

    log = tmp_path / "metrics.jsonl"
    new = NewRecords(log)
    assert list(new.read()) == []
    log.write_text(lines(range(1, 8)) + '{"epoch": 0, "st')
    assert [record.step for record in new.read()] == [*range(1, 8)]
    log.write_text(lines(range(1, 5)))
    assert [record.step for record in new.read()] == []
    log.write_text(lines(range(1, 5)) + lines(range(5, 12), odd="0"))
    assert [record.step for record in new.read()] == [8, 9, 10, 11]
    assert [record.step for record in new.read()] == []
    assert new.broken == 0


# -- several runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one that an alert warns of, one that was killed, and one that was steered."""
    folder = tmp_path_factory.mktemp("several")
    log = LogTraining("1 step", throughput=False)
    alert = Alert("train/loss > 2", to=[lambda message: None])
    tiny_run(directory=folder / "alerted", callbacks=[log, alert], losses=[1.0, 3.0, 1.0])
    died(folder / "deep" / "died", waits_after=5)
    tiny_run(directory=folder / "steered", callbacks=[log, Evaluate(tiny_loader())], seed=1)
    act = {"verb": "set", "arguments": {"lr": 0.01}, "author": "ann", "reason": "", "result": "lr 0.1 -> 0.01"}
    row = {
        "what": "steered",
        "who": "Steering",
        "why": "set lr=0.01 by ann: lr 0.1 -> 0.01",
        "epoch": 0,
        "step": 3,
        "data": act,
    }
    with (folder / "steered" / "decisions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"batch": 3, "samples": 6, "tokens": 0, **row}) + "\n")
    return folder


def test_several_runs_are_a_table_with_their_alerts_and_acts(folder: Path, cadenza: Command) -> None:
    title, _, head, *rows = cadenza("watch", folder, "--once", code=1).out.splitlines()
    assert title == "3 runs: 2 finished, 1 killed"
    assert head.split() == ["run", "state", "step", "done", "left", "alerts", "acts", "value"]
    cells = {row.split()[0]: row.split() for row in rows[:3]}
    assert cells["alerted"][1:7] == ["finished", "3", "of", "3", "100%", "1"]
    assert cells["died"][1] == "killed"
    assert cells["steered"][5:9] == ["100%", "1", "train/loss", cells["steered"][8]]
    assert "alerted: step 2: alerted by Alert: train/loss is 3, > 2" in rows
    assert "steered: step 3: steered by Steering: set lr=0.01 by ann: lr 0.1 -> 0.01" in rows


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_the_table_fits_the_terminal(columns: int, folder: Path) -> None:
    runs = FollowedRuns([folder])
    for run in runs.present():
        run.update()
    for rows in (6, 9, 24):
        lines = watch_command.table_of(runs.present(), "train/loss", columns, rows)
        assert len(lines) <= rows
        assert max(map(len, lines)) <= columns
    few = watch_command.table_of(runs.present(), None, columns, 5)
    assert few[-1] == "and 2 more runs"


def test_each_run_of_several_has_its_lines_and_its_json(folder: Path, cadenza: Command) -> None:
    out = cadenza("watch", folder / "steered", folder / "alerted", "--every", 0.05).out
    assert "alerted: epoch 0, step 2: train/loss 3  train/lr 0.1" in out
    assert f"{folder / 'steered'}: finished: the limit is reached" in out
    updates = [json.loads(line) for line in cadenza("watch", folder, "--json", code=1).out.splitlines()]
    assert {Path(update["run"]).name: update["state"] for update in updates} == {
        "alerted": "finished", "died": "killed", "steered": "finished",
    }  # fmt: skip
    alerts = {Path(update["run"]).name: [one["why"] for one in update["alerts"] + update["acts"]] for update in updates}
    assert alerts["alerted"] == ["train/loss is 3, > 2"]
    assert alerts["steered"] == ["set lr=0.01 by ann: lr 0.1 -> 0.01"]


def test_a_run_that_comes_into_the_folder_is_followed_to_its_end(
    folder: Path, tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path / "first", 4)

    def come() -> None:
        shutil.copytree(folder / "alerted", tmp_path / "second")
        (tmp_path / "first" / "go").touch()

    after_the_first_update(monkeypatch, come)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(directories, "_LIST_S", 0.0)
        out = cadenza("watch", tmp_path, "--every", 0.05).out
    process.join(300)
    assert f"{tmp_path / 'first'}: finished" in out
    assert re.search(r"first: .*step 9: number 9", out)
    assert "second: epoch 0, step 3: train/loss 1" in out


def test_an_alert_is_shown_though_many_decisions_came_later(folder: Path) -> None:
    run = Following(folder / "alerted")
    run.update()
    decided = run.story.decisions
    run.story.decisions = [*decided, *[one for one in decided if one.what != "alerted"] * 9]
    assert any("alerted by Alert: train/loss is 3" in line for line in watch_command.lines(run, 100, 24))


def test_a_copy_from_another_machine_is_not_said_to_be_killed(tmp_path: Path, cadenza: Command) -> None:
    died(tmp_path / "run", waits_after=5)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (copy / "run.lock").write_text("process 71 on node-3\n", encoding="utf-8")
    assert seen(copy, cadenza)["state"] == "elsewhere"
    assert "a process on node-3 trained it" in cadenza("why", copy).out


def test_a_copy_is_followed_as_long_as_it_grows(tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    died(tmp_path / "run", waits_after=5)
    (tmp_path / "run" / "run.lock").write_text("process 71 on node-3\n", encoding="utf-8")
    now = [time.monotonic()]
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    row = json.loads(lines[-1])

    def grow(seconds: float) -> None:
        """Pass time; the copy grows four times, each time after five seconds."""
        now[0] += 5
        if row["step"] < 9:
            row.update(step=row["step"] + 1, time=row["time"] + 5)
            with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        assert now[0] < began + 100, "the watch does not end"

    began, first = now[0], row["step"]
    monkeypatch.setattr("cadenza.report.commands.following.time.monotonic", lambda: now[0])
    monkeypatch.setattr("cadenza.report.commands.watch.time.sleep", grow)
    out = cadenza("watch", tmp_path).out
    assert [f"step {step}:" in out for step in range(first, 10)] == [True] * (10 - first)
    assert "elsewhere: a process on node-3 trained it" in out
    assert now[0] - began == 5 * (9 - first) + 20  # the first multiple of 5 s after three times the interval


def test_a_record_of_media_alone_says_how_many_there_are(tmp_path: Path, cadenza: Command) -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log({"note": Text("a"), "other": Text("b")})

    tiny_run(steps=1, directory=tmp_path, callbacks=[log])
    assert "step 1: 2 texts\n" in cadenza("watch", tmp_path).out
