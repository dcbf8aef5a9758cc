"""Who writes what with two processes: sinks, screen and run directory are the main one's; each keeps its own console log."""

from __future__ import annotations

import csv
import json
import logging
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on, sinks
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.sinks import (
    Comet,
    Console,
    Csv,
    Dvclive,
    JsonLines,
    Mlflow,
    ProgressBar,
    Sink,
    Swanlab,
    TensorBoard,
    Trackio,
    Wandb,
)
from cadenza.testing import launch
from tests.distributed.parts import rank, trainer
from tests.distributed.standing import on_ranks

QUIET = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}


def sinks_of_files() -> dict[type, Callback]:
    """Return one of each kind that writes to the screen or to files."""
    return {
        Console: Console(),
        ProgressBar: ProgressBar("plain", interval_s=60),
        Csv: Csv("train.csv"),
        JsonLines: JsonLines("train.jsonl"),
        TensorBoard: TensorBoard(),
        Dvclive: Dvclive(),
    }


def sinks_of_services(project: str) -> dict[type, Callback]:
    """Return one of each kind that would send to a service, which write to files here."""
    return {
        Mlflow: Mlflow(),
        Wandb: Wandb(project, mode="offline", settings=QUIET),
        Swanlab: Swanlab(project, mode="offline"),
        Trackio: Trackio(project),
        Comet: Comet(project, mode="offline"),
    }


def test_every_sink_is_in_a_list_above() -> None:
    """A new one must be added there, and what it wrote must be looked at in a test that follows."""
    listed = {*sinks_of_files(), *sinks_of_services("any"), Sink}
    assert {one.__name__ for one in listed} == {*sinks.__all__}


def train_with(directory: Path, some: dict[type, Callback]) -> list[str]:
    """Return the faults of a run with these sinks."""
    callbacks = [LogTraining("1 step", throughput=False), *some.values()]
    run = trainer(directory=directory, callbacks=callbacks).fit()  # others wait while the main one begins to talk to services
    if rank() == 0 and Wandb in some:
        import wandb

        wandb.teardown()  # a forked process ends without what is to be done at its exit
    return [f"{fault.callback}: {fault.error!r}" for fault in run.faults]


STEPS = [1, 2, 3, 4, 5, 6]


def steps_in(path: Path, delimiter: str = ",") -> list[int]:
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file, delimiter=delimiter)]


def test_sinks_write_each_record_once_from_the_main_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert launch(lambda: train_with(tmp_path, sinks_of_files())) == [[], []]
    shown = capfd.readouterr().out
    assert shown.count("finished after 2 epochs, 6 steps") == 1
    assert shown.count("step 3 ") == 1
    for name in ("metrics.jsonl", "train.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == STEPS
    assert steps_in(tmp_path / "train.csv") == STEPS
    assert steps_in(tmp_path / "dvclive" / "plots" / "metrics" / "train" / "loss.tsv", "\t") == STEPS
    [events] = tmp_path.rglob("events.out.tfevents*")
    tags = [value.tag for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    assert tags.count("train/loss") == 6


@pytest.mark.long
def test_sinks_of_services_write_each_record_once_from_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio.utils

    def rows(database: Path, query: str) -> list[Any]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(query).fetchall()

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    assert launch(lambda: train_with(tmp_path, sinks_of_services(tmp_path.name))) == [[], []]
    of_mlflow = "SELECT run_uuid, step FROM metrics WHERE key = 'train/loss' ORDER BY step"
    of_trackio = Path(trackio.utils.TRACKIO_DIR, f"{tmp_path.name}.db")
    for found in (
        rows(tmp_path / "mlflow.db", of_mlflow),
        rows(of_trackio, "SELECT run_id, step FROM metrics ORDER BY step"),
    ):
        assert len({run for run, _ in found}) == 1
        assert [step for _, step in found] == STEPS
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == len(list(tmp_path.glob("swanlog/run-*"))) == 1
    [archive] = (tmp_path / "comet").glob("*.zip")
    assert zipfile.Path(archive, "messages.json").read_text().count('"metricName":"train/loss"') == 6


@on(Callback.on_step_end)
def say(run: Run) -> None:
    run.print(f"rank {run.driver.rank} says {run.progress.step}")


@on(Callback.on_fit_end)
def warn(run: Run) -> None:
    run.warn(f"rank {run.driver.rank} warns")


def test_each_rank_keeps_what_it_says_in_a_log_of_its_own_and_goes_on_in_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def saying(steps: int) -> None:
        trainer(directory=tmp_path, max_epochs=None, max_steps=steps, callbacks=[say, warn, Checkpoint("1 step")]).fit("auto")

    launch(lambda: saying(2))
    launch(lambda: saying(3))
    said = capfd.readouterr()
    assert [line for line in said.out.splitlines() if " says " in line] == [f"rank 0 says {step}" for step in (1, 2, 3)]
    for number, name in enumerate(("console.log", "console.rank1.log")):
        steps = [f"rank {number} says {step}" for step in (1, 2, 3)]
        own = [line for line in (tmp_path / name).read_text().splitlines() if line.startswith("rank ")]
        assert own == [*steps[:2], f"rank {number} warns", steps[2], f"rank {number} warns"]
    assert sorted(path.name for path in tmp_path.glob("console*")) == ["console.log", "console.rank1.log"]


def test_a_rank_writes_no_line_that_the_main_process_writes_too(tmp_path: Path) -> None:
    @on(Callback.on_step_end)
    def say_alike(run: Run) -> None:
        run.print(f"{run.progress.step} steps are complete")
        if run.driver.rank == 1 and run.progress.step == 2:
            run.warn("the disk of rank 1 is slow")

    @on(Callback.on_fit_end)
    def warn_alike(run: Run) -> None:
        run.warn("the end\nof all ranks")

    def warning() -> None:
        trainer(directory=tmp_path / "one", callbacks=[say_alike, warn_alike]).fit()
        trainer(directory=tmp_path / "two", callbacks=[warn_alike]).fit()

    on_ranks(warning)
    assert (tmp_path / "one" / "console.rank1.log").read_text() == "the disk of rank 1 is slow\n"
    assert not (tmp_path / "two" / "console.rank1.log").exists()


def test_without_a_directory_a_warning_of_another_rank_is_shown_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    def warning() -> list[str]:
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer(callbacks=[warn]).fit()
        return [record.getMessage() for record in caplog.records if "warns" in record.getMessage()]

    assert launch(warning) == [["rank 0 warns"], ["rank 1: rank 1 warns"]]


def test_the_directory_belongs_to_the_main_process_and_all_know_where_it_is(tmp_path: Path) -> None:
    def known() -> tuple[Path | None, str, bool, int]:
        callbacks = [say, LogTraining("1 step", throughput=False), JsonLines("train.jsonl")]
        run = trainer(directory=tmp_path / "run", callbacks=callbacks).fit()
        return run.info.directory, run.info.id, run.is_main, len(run.history["train/loss"])

    first, second = on_ranks(known)
    assert first[0] == second[0] == tmp_path / "run"
    assert (first[2], second[2]) == (True, False)
    assert first[1]
    assert first[3] == second[3] == 6
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["console.log", "console.rank1.log", "metrics.jsonl", "run.json", "run.lock", "train.jsonl"]
    for name in ("metrics.jsonl", "train.jsonl"):
        assert len((tmp_path / "run" / name).read_text().splitlines()) == 6


def test_on_a_machine_without_the_main_ones_disks_the_log_is_kept_there(tmp_path: Path) -> None:
    def elsewhere() -> None:
        place = tmp_path / ("here" if rank() == 0 else "there") / "run"  # what is the same path on disks of their own
        trainer(directory=place, callbacks=[say]).fit()

    on_ranks(elsewhere)
    assert sorted(path.name for path in (tmp_path / "there" / "run").iterdir()) == ["console.rank1.log"]
