"""Csv: records as a table."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pandas
import pytest

from cadenza import Callback, Run, Text, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.errors import DirectoryError
from cadenza.sinks import Csv
from cadenza.testing import check_callback, tiny_run, tiny_trainer


@on(Callback.on_step_end)
def log_number(run: Run) -> None:
    run.log("number", run.progress.step / 3)


@on(Callback.on_step_end, every=2)
def log_odd(run: Run) -> None:
    run.log({"odd, really": float("inf") if run.progress.step == 4 else float("nan"), "whole": 7})


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_each_record_is_a_row_and_what_it_lacks_is_empty(tmp_path: Path) -> None:
    tiny_run(callbacks=[log_number, log_odd, Csv()], steps=4, directory=tmp_path)
    rows = rows_of(tmp_path / "metrics.csv")
    assert list(rows[0]) == ["epoch", "step", "batch", "samples", "time", "number", "odd, really", "whole"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["number"]) for row in rows] == [1 / 3, 2 / 3, 1.0, 4 / 3]
    assert [(row["odd, really"], row["whole"]) for row in rows] == [("", ""), ("nan", "7"), ("", ""), ("inf", "7")]


def test_pandas_reads_it_as_the_run_had_it(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[log_number, log_odd, Csv("own.csv")], steps=4, directory=tmp_path)
    frame = pandas.read_csv(tmp_path / "own.csv").set_index("step")
    pandas.testing.assert_frame_equal(frame[run.history.names].astype(float), run.history.to_frame(), check_exact=True)


def test_every_row_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        seen.append(len(rows_of(tmp_path / "metrics.csv")))

    tiny_run(callbacks=[log_number, log_odd, look, Csv()], steps=4, directory=tmp_path)
    assert seen == [0, 1, 2, 3]


def test_a_record_of_media_alone_is_no_row(tmp_path: Path) -> None:
    note = on(Callback.on_fit_end)(lambda run: run.log("note", Text("done")))
    tiny_run(callbacks=[log_number, note, Csv()], steps=2, directory=tmp_path)
    assert len(rows_of(tmp_path / "metrics.csv")) == 2


def fit_for(directory: Path, *, killed_at: int | None = None, every: str = "3 steps") -> None:
    @on(Callback.on_step_end, at=killed_at or 100)
    def kill(run: Run) -> None:
        raise KeyboardInterrupt

    callbacks = [log_number, log_odd, Csv(), Checkpoint(every=every, on_exception=False), kill]
    tiny_trainer(callbacks=callbacks, steps=8, directory=directory, seed=1).fit(resume="auto")


def without_time(path: Path) -> list[dict[str, str]]:
    return [{name: cell for name, cell in row.items() if name != "time"} for row in rows_of(path)]


@pytest.mark.parametrize("every", ["3 steps", "100 steps"])  # with the second there is no checkpoint, and it starts anew
def test_a_run_that_is_continued_ends_with_the_table_of_one_that_was_not(tmp_path: Path, every: str) -> None:
    fit_for(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit_for(tmp_path / "cut", killed_at=5, every=every)
    table = tmp_path / "cut" / "metrics.csv"
    table.write_text(table.read_text().replace("\n2,", "\n") + "0,6,6,1")  # a row was lost, and one is cut: a kill may do that
    fit_for(tmp_path / "cut", every=every)
    assert without_time(table) == without_time(tmp_path / "whole" / "metrics.csv")


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("mine\n")
    with pytest.raises(DirectoryError, match=r"Csv would write .* but the file exists and is not overwritten\. Give"):
        tiny_run(callbacks=[log_number, Csv(own)])
    assert own.read_text() == "mine\n"


def test_a_file_of_others_is_not_touched_by_a_run_that_is_continued_either(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit_for(tmp_path, killed_at=4)
    (tmp_path / "metrics.csv").write_text("mine\n")
    with pytest.raises(DirectoryError, match="is not overwritten"):
        fit_for(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "mine\n"


def test_the_log_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"metrics.jsonl' is the run's own file of records\. Give Csv another name"):
        tiny_run(callbacks=[log_number, Csv("metrics.jsonl")], directory=tmp_path)


def test_one_instance_serves_several_runs(tmp_path: Path) -> None:
    sink = Csv()
    for name in ("one", "two"):
        tiny_run(callbacks=[log_number, sink], steps=2, directory=tmp_path / name)
    assert [len(rows_of(tmp_path / name / "metrics.csv")) for name in ("one", "two")] == [2, 2]


def test_a_full_disk_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    sink = Csv()

    @on(Callback.on_step_start, at=3)
    def fill(run: Run) -> None:
        assert sink._file is not None
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), sink._file.fileno())  # from now on its writes do what they do on a full disk

    run = tiny_run(callbacks=[log_number, fill, sink], steps=5, directory=tmp_path)
    assert [(fault.callback, str(fault.error)) for fault in run.faults] == [("Csv", "[Errno 28] No space left on device")]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_it_keeps_the_contract_of_callbacks() -> None:
    count = iter(range(10))
    check_callback(lambda: Csv(f"own{next(count)}.csv"))


def test_tokens_are_a_column_if_they_are_counted(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, tokens=lambda batch: 3, callbacks=[LogTraining(2, throughput=False), Csv()])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["tokens"] for row in csv.DictReader(file)] == ["6", "12"]
