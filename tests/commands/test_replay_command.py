"""``cadenza replay``: a run's records taken to a sink afterwards, or while it goes on. For trackers see tests/sinks."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cadenza import Callback, Run, Text, on
from cadenza.commands import replay as replay_command
from cadenza.records.reading import NewRecords
from cadenza.sinks import Csv, TensorBoard
from cadenza.testing import tiny_run
from tests.commands.parts import Command, died, going_on
from tests.waiting import until


@on(Callback.on_step_end)
def log_number(run: Run) -> None:
    run.log({"number": run.progress.step / 2, "odd": float("nan"), "note": Text("only words")})


@pytest.fixture
def over(tmp_path: Path) -> Path:
    """A run that is over, and wrote a table of its own."""
    tiny_run(callbacks=[log_number, Csv("own.csv")], steps=5, directory=tmp_path / "over", seed=1)
    return tmp_path / "over"


def steps_in(table: Path) -> list[int]:
    with table.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "metrics.csv"}


def test_every_record_of_a_run_that_is_over_gets_there_as_the_run_would_have_written_it(over: Path, cadenza: Command) -> None:
    before = files_of(over)
    told = cadenza("replay", over, "--to", "csv").out
    assert told == f"5 records of {over} are in csv now; pictures, sounds and texts are not in metrics.jsonl\n"
    assert steps_in(over / "metrics.csv") == [1, 2, 3, 4, 5]
    assert (over / "metrics.csv").read_text() == (over / "own.csv").read_text()
    assert files_of(over) == before


def test_tensorboard_shows_what_the_run_would_have_shown(over: Path, tmp_path: Path, cadenza: Command) -> None:
    cadenza("replay", over, "--to", "tensorboard", "--output", tmp_path / "elsewhere")
    events = EventAccumulator(str(tmp_path / "elsewhere")).Reload().Scalars("number")
    times = [json.loads(line)["time"] for line in (over / "metrics.jsonl").read_text().splitlines()]
    assert [(event.step, event.value, round(event.wall_time, 3)) for event in events] == [
        (step, step / 2, when) for step, when in enumerate(times, 1)
    ]


def test_what_a_kill_cut_is_left_out_and_what_cannot_be_read_is_told(over: Path, cadenza: Command) -> None:
    with (over / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"epoch": 0, "st')
    told = cadenza("replay", over, "--to", "csv").out
    assert steps_in(over / "metrics.csv") == [1, 2, 3, 4, 5]
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
