"""JsonLines, Csv and TensorBoard: files that can be read at any time, and that no other run overwrites; and where files lie."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy
import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cadenza import Callback, Figure, Run, Text, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining, Profile, SavePredictions
from cadenza.errors import DirectoryError
from cadenza.sinks import Csv, JsonLines, TensorBoard
from cadenza.sinks.sink import Sink
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.sinks.readers import TENSORBOARD
from tests.sinks.samples import failing, logging, metrics_of, pixels
from tests.sinks.terminal import Terminal

Make = Callable[[str | Path], Sink]
BOTH = pytest.mark.parametrize("make", [JsonLines, Csv])


log_number = on(Callback.on_step_end)(lambda run: run.log({"number": run.progress.step / 3, "odd": float("nan")}))


@on(Callback.on_step_end, every=2)
def log_seldom(run: Run) -> None:
    run.log({"odd, really": float("inf") if run.progress.step == 4 else float("nan"), "whole": 7})


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file as they stand there, without times."""
    with path.open(newline="", encoding="utf-8") as file:
        table = file.read(1) != "{"
        file.seek(0)
        rows: list[dict[str, Any]] = list(csv.DictReader(file)) if table else metrics_of(path.parent, path.name)
    return [{name: cell for name, cell in row.items() if name != "time"} for row in rows]


# -- both kinds of lines -------------------------------------------------------------------------------


@BOTH
def test_each_line_can_be_read_while_the_run_goes_on(make: Make, tmp_path: Path) -> None:
    seen: list[int] = []
    own = tmp_path / "deep" / "own"
    look = on(Callback.on_step_start)(lambda run: seen.append(len(rows_of(own))))
    tiny_run(callbacks=[log_number, log_seldom, look, make("deep/own")], steps=4, directory=tmp_path)
    assert seen == [0, 1, 2, 3]
    assert [int(row["step"]) for row in rows_of(own)] == [1, 2, 3, 4]


@BOTH
def test_the_last_records_are_there_however_the_run_ends(make: Make, tmp_path: Path) -> None:
    late = on(Callback.on_fit_end)(lambda run: run.log("late", 1))
    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[make("own"), log_number, late, failing(2)], directory=tmp_path)
    first, last = rows_of(tmp_path / "own")
    assert (float(first["number"]), first.get("late") or None) == (1 / 3, None)
    assert (float(last["number"]), int(last["late"])) == (2 / 3, 1)


@BOTH
def test_a_file_that_exists_and_that_of_the_run_itself_are_refused_and_not_touched(make: Make, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("mine\n")
    with pytest.raises(DirectoryError, match=r"but the file exists and is not overwritten\. Give another path"):
        tiny_run(callbacks=[log_number, make(own)])
    assert own.read_text() == "mine\n"
    own.unlink()
    with pytest.raises(KeyboardInterrupt):
        fit_for(make, tmp_path, killed_at=4)
    own.write_text("mine\n")
    with pytest.raises(DirectoryError, match="is not overwritten"):  # also when the run is continued
        fit_for(make, tmp_path)
    assert own.read_text() == "mine\n"
    message = rf"metrics.jsonl' is the run's own file of records\. Give {make.__name__} another name"
    with pytest.raises(DirectoryError, match=message):
        tiny_run(callbacks=[log_number, make("metrics.jsonl")], directory=tmp_path / "other")


def fit_for(make: Make, directory: Path, *, killed_at: int = 100, every: str = "3 steps") -> None:
    callbacks = [log_number, log_seldom, make("own"), Checkpoint(every=every, on_exception=False), failing(killed_at)]
    tiny_trainer(callbacks=callbacks, steps=8, directory=directory, seed=1).fit(resume="auto")


@BOTH
@pytest.mark.parametrize("every", ["3 steps", "100 steps"])  # with the second there is no checkpoint, and it starts anew
def test_a_run_that_is_continued_ends_with_the_lines_of_one_that_was_not(make: Make, every: str, tmp_path: Path) -> None:
    fit_for(make, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit_for(make, tmp_path / "cut", killed_at=5, every=every)
    own = tmp_path / "cut" / "own"
    cut = {JsonLines: '{"epoch": 0, "st', Csv: "0,6,6,1"}[make]  # type: ignore[index]  # as a kill leaves it
    own.write_text(own.read_text().replace("\n2,", "\n") + cut)  # and a row of the table was lost
    fit_for(make, tmp_path / "cut", every=every)
    assert rows_of(own) == rows_of(tmp_path / "whole" / "own")
    assert [int(row["step"]) for row in rows_of(own)] == [*range(1, 9)]


# -- JsonLines and Csv ---------------------------------------------------------------------------------


def test_a_file_of_lines_holds_the_records_of_the_run(tmp_path: Path) -> None:
    tiny_run(callbacks=[log_number, JsonLines("own.jsonl")], steps=2, directory=tmp_path)
    own = metrics_of(tmp_path, "own.jsonl")
    assert own == metrics_of(tmp_path)
    assert [(line["step"], line["number"], line["odd"]) for line in own] == [(1, 1 / 3, "NaN"), (2, 2 / 3, "NaN")]


def test_each_record_is_a_row_of_the_table_and_what_it_lacks_is_empty(tmp_path: Path) -> None:
    note = on(Callback.on_fit_end)(lambda run: run.log("note", Text("done")))  # a record of media alone is no row
    run = tiny_run(callbacks=[log_number, log_seldom, note, Csv()], steps=4, directory=tmp_path)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "step", "batch", "samples", "time", "number", "odd", "odd, really", "whole"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["number"]) for row in rows] == [1 / 3, 2 / 3, 1.0, 4 / 3]
    assert [(row["odd, really"], row["whole"]) for row in rows] == [("", ""), ("nan", "7"), ("", ""), ("inf", "7")]
    frame = pandas.read_csv(tmp_path / "metrics.csv").set_index("step")  # as the run had it
    pandas.testing.assert_frame_equal(frame[run.history.names].astype(float), run.history.to_frame(), check_exact=True)


def test_tokens_are_a_column_if_they_are_counted(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, tokens=lambda batch: 3, callbacks=[LogTraining(2, throughput=False), Csv()])
    assert [row["tokens"] for row in rows_of(tmp_path / "metrics.csv")] == ["6", "12"]


def test_a_full_disk_disables_a_table_and_the_run_goes_on(tmp_path: Path) -> None:
    sink = Csv()

    @on(Callback.on_step_start, at=3)
    def fill(run: Run) -> None:
        assert sink._file is not None
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), sink._file.fileno())  # from now on its writes do what they do on a full disk

    run = tiny_run(callbacks=[log_number, fill, sink], steps=5, directory=tmp_path)
    assert [(fault.callback, str(fault.error)) for fault in run.faults] == [("Csv", "[Errno 28] No space left on device")]
    assert len(metrics_of(tmp_path)) == 5


# -- TensorBoard ---------------------------------------------------------------------------------------


def test_a_figure_becomes_an_image_and_stays_as_it_was(tmp_path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 3, 2])
    canvas = figure.canvas
    run = tiny_run(callbacks=[logging({"plot": Figure(figure)}), TensorBoard()], steps=1, directory=tmp_path)
    [image] = TENSORBOARD.events(run.info).Images("plot")
    assert image.step == 1
    shown = pixels(image.encoded_image_string)
    assert shown.shape == (50, 100, 3)
    assert len(numpy.unique(shown)) > 10
    assert figure.canvas is canvas


def test_what_is_logged_last_is_in_the_one_file_too(tmp_path: Path) -> None:
    late = on(Callback.on_fit_end)(lambda run: run.log("late", 1))
    tiny_run(callbacks=[TensorBoard(tmp_path), late], steps=1)
    assert len(list(tmp_path.iterdir())) == 1
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("late")[0].value == 1


def test_a_run_that_is_continued_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    def fit(factor: int, killed_at: int = 100) -> Run:
        log = on(Callback.on_step_end)(lambda run: run.log("a", factor * run.progress.step))
        callbacks = [log, TensorBoard(), Checkpoint(every="3 steps", on_exception=False), failing(killed_at)]
        return tiny_trainer(callbacks=callbacks, steps=6, directory=tmp_path).fit(resume="auto")

    with pytest.raises(KeyboardInterrupt):
        fit(1, killed_at=5)
    assert TENSORBOARD.values(fit(10).info)["a"] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


DISK_FULL = """
import json, resource
import torch
from cadenza import Callback, Image, on
from cadenza.sinks import TensorBoard
from cadenza.testing import tiny_run

resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

@on(Callback.on_step_end)
def log(run):
    run.log({"number": run.progress.step, "noise": Image(torch.rand(3, 64, 64))})

run = tiny_run(callbacks=[log, TensorBoard()], steps=200, directory=DIRECTORY)
print(json.dumps([run.outcome.kind, [fault.callback for fault in run.faults], [decision.what for decision in run.decisions]]))
"""


def test_on_a_full_disk_it_says_what_it_misses_and_the_run_goes_on(tmp_path: Path) -> None:
    with Terminal(DISK_FULL.replace("DIRECTORY", repr(str(tmp_path / "run"))), width=None) as process:
        pass
    assert process.exit_code == 0, process.written
    assert '["finished", ["TensorBoard"], ["failed", "not sent"]]' in process.written.splitlines()
    assert "TensorBoard failed in " in process.written
    assert "File too large" in process.written
    assert len(metrics_of(tmp_path / "run")) == 200


# -- a relative path means the working directory in which the object was made, also when the script changes it ---


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return two folders; the first is the working directory."""
    made, later = tmp_path / "made", tmp_path / "later"
    made.mkdir()
    later.mkdir()
    monkeypatch.chdir(made)
    return made, later


def test_a_run_writes_to_one_directory_although_the_script_goes_elsewhere(folders: tuple[Path, Path]) -> None:
    made, later = folders
    move = on(Callback.on_step_end, at=2)(lambda run: os.chdir(later))
    trainer = tiny_trainer(directory="run", callbacks=[LogTraining("1 step"), move, Checkpoint("2 steps"), Csv()], steps=5)
    os.chdir(later)
    run = trainer.fit()
    assert run.info.directory == trainer.directory == made / "run"
    assert [*later.iterdir()] == []
    assert len((made / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert len([*(made / "run" / "checkpoints").glob("step-*")]) == 2
    assert trainer.fit(resume="auto").progress.step == 5  # it finds the run that is over


def test_without_a_directory_paths_of_callbacks_start_where_the_trainer_was_made(folders: tuple[Path, Path]) -> None:
    made, later = folders
    callbacks: list[Callback] = [
        LogTraining("1 step"),
        Evaluate(tiny_loader(1)),
        Checkpoint(directory="saved"),
        Csv("table.csv"),
        JsonLines("lines.jsonl"),
        Profile(trace="trace.json", window=(0, 2)),
        SavePredictions("predictions.csv", evaluation="eval", columns={"prediction": lambda batch, outputs: batch[1]}),
    ]
    trainer = tiny_trainer(callbacks=callbacks, compute_loss=supervised(lambda out, y: ((out - y) ** 2).mean()), batches=2)
    os.chdir(later)
    trainer.fit()
    assert [*later.iterdir()] == []
    assert len(rows_of(made / "table.csv")) == len(rows_of(made / "lines.jsonl")) == 3
    assert {path.name for path in made.iterdir()} == {"saved", "table.csv", "lines.jsonl", "trace.json", "predictions.csv"}


def test_a_url_is_no_directory_of_a_run_and_one_for_checkpoints_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"must be a local folder; got the URL 's3://bucket/run'\. Give a local"):
        tiny_trainer(directory="s3://bucket/run")
    assert Checkpoint(directory="memory://bucket/run").directory == "memory://bucket/run"


def test_a_working_directory_that_is_gone_does_not_matter_to_an_absolute_path(folders: tuple[Path, Path]) -> None:
    made, later = folders
    os.chdir(later)
    later.rmdir()
    run: Run = tiny_run(directory=made / "run", callbacks=[Checkpoint()], steps=1)
    assert run.outcome is not None
