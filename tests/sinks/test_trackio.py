"""Trackio: what it keeps is read back from its database; there is no server and no network."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import MissingExtraError
from cadenza.sinks import Trackio
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_tone, check_whole, logging, metrics_of


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """Trackio's directory, which it chose when it was imported; see that no thread stays behind."""
    import trackio.utils

    assert str(trackio.utils.TRACKIO_DIR) == os.environ["TRACKIO_DIR"], "conftest.py keeps it away from the user's own runs"
    before = set(threading.enumerate())
    yield trackio.utils.TRACKIO_DIR
    assert set(threading.enumerate()) - before == set()


@pytest.fixture
def project(tmp_path: Path) -> str:
    return tmp_path.name


@dataclass(frozen=True)
class Stored:
    """What stands in a project's database."""

    file: Path

    def select(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.file)) as connection:
            return connection.execute(query).fetchall()

    def holds(self, rows: int) -> bool:
        """Whether so many rows are there yet; the file comes before its tables."""
        try:
            return self.file.exists() and len(self.rows()) >= rows
        except sqlite3.OperationalError:
            return False

    @property
    def runs(self) -> list[str]:
        """The names of the runs, in order."""
        return [name for (name,) in self.select("SELECT run_name FROM metrics GROUP BY run_id ORDER BY MIN(id)")]

    def rows(self, run: str = "%") -> list[tuple[int, dict[str, Any]]]:
        """All (step, values) in order."""
        found = self.select(f"SELECT step, metrics FROM metrics WHERE run_name LIKE '{run}' ORDER BY id")
        return [(step, json.loads(values)) for step, values in found]

    @property
    def config(self) -> dict[str, Any]:
        [(content,)] = self.select("SELECT config FROM configs")
        return {name: value for name, value in json.loads(content).items() if not name.startswith("_")}


@pytest.fixture
def stored(folder: Path, project: str) -> Stored:
    return Stored(folder / f"{project}.db")


def test_every_value_stands_at_its_step(tmp_path: Path, project: str, stored: Stored) -> None:
    log = LogTraining(every="2 steps", throughput=False)
    many = logging({"x": 0.1, "nan": float("nan"), "inf": float("-inf")})
    run = tiny_run(callbacks=[log, many, Evaluate(tiny_loader()), Trackio(project)], epochs=60, directory=tmp_path)
    rows = stored.rows()
    for name in ("train/loss", "eval/loss", "x"):
        assert [(step, values[name]) for step, values in rows if name in values] == run.history[name]
    assert len(run.history["x"]) == 300
    assert len(run.history["eval/loss"]) == 60
    assert {(values["nan"], values["inf"]) for _, values in rows if "x" in values} == {("NaN", "-Infinity")}
    assert len(rows) == len(metrics_of(tmp_path))


def test_the_arguments_of_the_run_are_the_configuration(tmp_path: Path, project: str, stored: Stored) -> None:
    sink = Trackio(project, config={"seed": "mine", "data": {"size": 3}})
    run = tiny_run(callbacks=[logging({"a": 1}), sink], steps=1, directory=tmp_path / "small")
    assert stored.config == {**run.info.arguments, "seed": "mine", "data": {"size": 3}}
    assert stored.runs == [f"small-{run.info.id[:8]}"]


def test_media_come_back_as_they_were(tmp_path: Path, folder: Path, project: str, stored: Stored) -> None:
    tiny_run(callbacks=[logging(MEDIA), Trackio(project)], steps=1, directory=tmp_path)
    [(step, row)] = stored.rows()
    content = {name: (folder / "media" / row[name]["file_path"]).read_bytes() for name in ("whole", "bright", "tone")}
    check_whole(content["whole"])
    check_bright(content["bright"])
    check_tone(content["tone"])
    assert (row["w"]["bins"][0], row["w"]["bins"][-1], sum(row["w"]["values"])) == (-1, 1, 3)
    assert row["note"]["_value"] == "1 < 2"
    assert step == 1


def test_media_that_cannot_be_shown_are_left_out_with_one_remark(tmp_path: Path, project: str, stored: Stored) -> None:
    run = tiny_run(callbacks=[logging(EMPTY), Trackio(project)], steps=3, directory=tmp_path)
    assert run.faults == []
    assert stored.rows() == [(1, {"a": 1}), (2, {"a": 1}), (3, {"a": 1})]
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "Trackio: 'w' of step 1 has no values to show, and is left out",
        "Trackio: 'tone' of step 1 has no values to show, and is left out",
    ]


def test_a_run_of_your_own_is_not_touched(tmp_path: Path, project: str, stored: Stored) -> None:
    import trackio

    own: Any = trackio.init(project, name="own", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    try:
        tiny_run(callbacks=[logging({"theirs": 1}), Trackio(project, run_name="theirs")], steps=1, directory=tmp_path)
        trackio.log({"mine": 1})
    finally:
        own.finish()
        trackio.context_vars.current_run.set(None)
    assert stored.rows("own") == [(0, {"mine": 1})]
    assert stored.rows("theirs") == [(1, {"theirs": 1})]


def test_one_instance_serves_several_runs(tmp_path: Path, project: str, stored: Stored) -> None:
    sink = Trackio(project)
    for name, steps in (("one", 2), ("two", 3)):
        tiny_run(callbacks=[logging({"a": 1}), sink], steps=steps, directory=tmp_path / name)
    assert (len(stored.rows("one%")), len(stored.rows("two%"))) == (2, 3)


def test_a_continued_run_goes_on_and_what_came_after_its_checkpoint_is_replaced(
    tmp_path: Path, project: str, stored: Stored
) -> None:
    @on(Callback.on_step_end, at=5)
    def fail(run: Run) -> None:
        raise ArithmeticError

    def fit(*more: Callback) -> None:
        log = LogTraining(every="1 step", throughput=False)
        callbacks = [log, Checkpoint(every="3 steps", keep_last=1), Trackio(project), *more]
        tiny_trainer(callbacks=callbacks, steps=8, directory=tmp_path).fit(resume="auto")

    with pytest.raises(ArithmeticError):
        fit(fail)
    assert [step for step, _ in stored.rows()][:4] == [1, 2, 3, 4]
    fit()
    assert len(stored.runs) == 1
    assert [step for step, _ in stored.rows()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [values["train/loss"] for _, values in stored.rows()] == [line["train/loss"] for line in metrics_of(tmp_path)]


def test_two_runs_of_one_name_are_two(tmp_path: Path, project: str, stored: Stored) -> None:
    for folder in ("one", "two"):
        tiny_run(callbacks=[logging({"a": 1}), Trackio(project, run_name="same")], steps=2, directory=tmp_path / folder)
    assert stored.runs == ["same", "same"]


def test_a_database_that_cannot_be_written_disables_it_and_the_run_goes_on(
    tmp_path: Path, project: str, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    stored.file.mkdir(parents=True)
    run = tiny_run(callbacks=[logging({"a": 1}), Trackio(project)], steps=5, directory=tmp_path)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert [fault.callback for fault in run.faults] == ["Trackio"]
    assert caplog.text.count("Trackio failed in") == 1
    assert len(metrics_of(tmp_path)) == 5


def test_lost_rows_are_reported(tmp_path: Path, project: str, stored: Stored) -> None:
    @on(Callback.on_fit_end)
    def lose(run: Run) -> None:
        while not stored.holds(3):
            threading.Event().wait(0.01)
        with closing(sqlite3.connect(stored.file, timeout=30)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE step = 2")

    run = tiny_run(callbacks=[logging({"a": 1}), Trackio(project), lose], steps=3, directory=tmp_path)
    assert [str(fault.error) for fault in run.faults] == [f"Trackio wrote 2 of 3 records to {str(stored.file)!r}"]


def test_without_a_directory_the_run_has_a_name_all_the_same(project: str, stored: Stored) -> None:
    run = tiny_run(callbacks=[logging({"a": 1}), Trackio(project)], steps=2)
    assert run.faults == []
    assert len(stored.runs) == 1


def test_a_missing_package_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match=r"Trackio needs .*pip install 'cadenza\[trackio\]'"):
        Trackio()


def test_it_keeps_the_contract_of_callbacks(project: str) -> None:
    check_callback(lambda: Trackio(project))
