"""``cadenza replay``: a run's records taken to a sink afterwards, or while it goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cadenza import Callback, Run, Text, on
from cadenza.commands import replay as replay_command
from cadenza.commands.main import main
from cadenza.records.reading import NewRecords
from cadenza.sinks import Csv, TensorBoard
from cadenza.testing import tiny_run
from tests.sinks.wandb_file import WandbFile


@on(Callback.on_step_end)
def log_number(run: Run) -> None:
    run.log({"number": run.progress.step / 2, "odd": float("nan"), "note": Text("only words")})


@pytest.fixture
def over(tmp_path: Path) -> Path:
    """A run that is over."""
    tiny_run(callbacks=[log_number], steps=5, directory=tmp_path / "over", seed=1)
    return tmp_path / "over"


def steps_in(table: Path) -> list[int]:
    with table.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_every_record_of_a_run_that_is_over_gets_there(over: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(over)
    assert main(["replay", str(over), "--to", "csv"]) == 0
    assert steps_in(over / "metrics.csv") == [1, 2, 3, 4, 5]
    assert {name: content for name, content in files_of(over).items() if name != "metrics.csv"} == before
    assert capsys.readouterr().out == (
        f"5 records of {over} are in csv now; pictures, sounds and texts are not in metrics.jsonl\n"
    )


def test_it_is_the_same_table_as_that_of_the_run_itself(tmp_path: Path) -> None:
    tiny_run(callbacks=[log_number, Csv("own.csv")], steps=5, directory=tmp_path)
    main(["replay", str(tmp_path), "--to", "csv"])
    assert (tmp_path / "metrics.csv").read_text() == (tmp_path / "own.csv").read_text()


def test_tensorboard_shows_what_the_run_would_have_shown(over: Path, tmp_path: Path) -> None:
    assert main(["replay", str(over), "--to", "tensorboard", "--output", str(tmp_path / "elsewhere")]) == 0
    events = EventAccumulator(str(tmp_path / "elsewhere")).Reload().Scalars("number")
    times = [json.loads(line)["time"] for line in (over / "metrics.jsonl").read_text().splitlines()]
    assert [(event.step, event.value, round(event.wall_time, 3)) for event in events] == [
        (step, step / 2, when) for step, when in enumerate(times, 1)
    ]


def test_mlflow_has_its_arguments_and_outcome_and_nothing_twice(over: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    place = f"sqlite:///{tmp_path}/all.db"
    assert [main(["replay", str(over), "--to", "mlflow", "--output", place]) for _ in range(2)] == [0, 0]
    client = MlflowClient(place)
    experiment = client.get_experiment_by_name("cadenza")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["seed"]) == ("over", "FINISHED", "1")
    history = client.get_metric_history(run.info.run_id, "number")
    assert [(metric.step, metric.value) for metric in history] == [(step, step / 2) for step in range(1, 6)]


def test_wandb_takes_them_offline(over: Path, tmp_path: Path) -> None:
    # A process of its own: wandb reads its environment once.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | {"WANDB_MODE": "offline"}
    code = "import sys; from cadenza.commands.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "replay", str(over), "--to", "wandb", "--output", str(tmp_path / "w")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    [file] = (tmp_path / "w").rglob("*.wandb")
    assert [row["number"] for row in WandbFile(file).rows] == [0.5, 1.0, 1.5, 2.0, 2.5]


def test_what_a_kill_cut_is_left_out_and_what_cannot_be_read_is_told(over: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (over / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"epoch": 0, "st')
    assert main(["replay", str(over), "--to", "csv"]) == 0
    assert steps_in(over / "metrics.csv") == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.endswith("1 lines of metrics.jsonl cannot be read, and are left out\n")


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_nothing_is_added_to_what_the_run_itself_wrote(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(callbacks=[log_number, TensorBoard(), Csv()], steps=2, directory=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["replay", str(tmp_path), "--to", name]) == 1
    assert "exists already, perhaps written by the run itself" in (told := capsys.readouterr().err)
    assert "Give another --output" in told
    usual = replay_command.TARGETS[name].usual
    assert main(["replay", str(tmp_path), "--to", name, "--output", str(tmp_path / usual)]) == 1
    assert "replay never overwrites. Give another --output" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--to", "csv"]) == 1
    assert "is not the directory of a run: its run.json cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


GOING_ON = """
import sys, time
from pathlib import Path
from cadenza import Callback, on
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer

@on(Callback.on_step_end)
def log(run):
    run.log("number", run.progress.step)
    while run.progress.step == int(sys.argv[2]) and not Path(sys.argv[1], "go").exists():
        time.sleep(0.01)

tiny_trainer(callbacks=[log, Checkpoint(every="3 steps")], steps=9, directory=sys.argv[1]).fit(resume="auto")
"""


def going_on(directory: Path, waits_at: int) -> subprocess.Popen[bytes]:
    """Start a run that waits at a step for a file named ``go``, and come back when it is there."""
    process = subprocess.Popen([sys.executable, "-c", GOING_ON, str(directory), str(waits_at)])
    log = directory / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < waits_at - 1:
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_with_follow_it_goes_on_until_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = going_on(tmp_path, waits_at=5)
    monkeypatch.setattr(replay_command, "_POLL_S", 0.05)

    def let_go_when_all_is_there() -> None:
        while not (table := tmp_path / "metrics.csv").exists() or steps_in(table) != [1, 2, 3, 4]:
            time.sleep(0.01)
        (tmp_path / "go").touch()

    other = threading.Thread(target=let_go_when_all_is_there, daemon=True)
    other.start()
    assert main(["replay", str(tmp_path), "--to", "csv", "--follow"]) == 0
    assert process.wait(300) == 0
    other.join(200)
    assert steps_in(tmp_path / "metrics.csv") == [*range(1, 10)]


def test_follow_ends_when_the_run_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = going_on(tmp_path, waits_at=5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(300)
    assert main(["replay", str(tmp_path), "--to", "csv", "--follow"]) == 0
    assert capsys.readouterr().out.startswith(f"4 records of {tmp_path} are in csv now")


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
