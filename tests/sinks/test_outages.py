"""Sinks that fail for a while: they are tried again, and what they missed is sent, each record once."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from cadenza import Callback, Image, Record, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.errors import CallbackError, DirectoryError
from cadenza.records import writer
from cadenza.sinks import Csv
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.distributed.parts import trainer as trainer_on_ranks
from tests.sinks.outages import (
    DOWN,
    EXPECTED,
    STEPS,
    UP,
    Clock,
    FailingCsv,
    FailingDvclive,
    FailingMlflow,
    FailingTensorBoard,
    Posting,
    Server,
    outage,
    rows_of_csv,
    rows_of_dvclive,
    rows_of_mlflow,
    rows_of_tensorboard,
    stopping,
    ticking,
)
from tests.waiting import until

KINDS = [
    (FailingCsv, rows_of_csv),
    (FailingTensorBoard, rows_of_tensorboard),
    (FailingMlflow, rows_of_mlflow),
    (FailingDvclive, rows_of_dvclive),
]


@pytest.mark.parametrize(("make", "read"), KINDS)
def test_a_sink_that_fails_for_300_steps_ends_with_every_row_once(
    make: Callable[[], Sink], read: Callable[[Run], list[tuple[int, float]]], tmp_path: Path
) -> None:
    sink = make()
    run = tiny_run(callbacks=[ticking(Clock()), outage(sink), sink], steps=STEPS, directory=tmp_path / "run")
    assert read(run) == EXPECTED
    assert [(decision.what, decision.who) for decision in run.decisions] == [
        ("failed", type(sink).__name__),
        ("recovered", type(sink).__name__),
    ]


@pytest.mark.parametrize(("make", "read"), [kind for kind in KINDS if kind[0] is not FailingMlflow])  # it takes long to start
def test_a_run_that_is_continued_sends_what_its_sink_missed_before(
    make: Callable[[], Sink], read: Callable[[Run], list[tuple[int, float]]], tmp_path: Path
) -> None:
    def fit(sink: Sink, *more: Callback, steps: int = STEPS) -> Run:
        callbacks = [ticking(Clock()), *more, sink, Checkpoint(every="100 steps")]
        return tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path / "run").fit(resume="auto")

    first = make()
    with pytest.raises(KeyError, match="on purpose"):
        fit(first, outage(first, end=1000), failing_at(250))
    run = fit(make())
    assert read(run) == EXPECTED
    [recovered] = [decision.why for decision in run.decisions if decision.what == "recovered"]
    assert re.fullmatch(r"\d+ records after step 49 went to it", recovered)


def failing_at(step: int) -> Callback:
    @on(Callback.on_step_end, at=step)
    def fail(run: Run) -> None:
        raise KeyError("on purpose")

    return fail


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


@pytest.mark.parametrize("in_directory", [True, False])
def test_a_server_that_goes_away_for_300_steps_has_each_row_once(server: Server, tmp_path: Path, in_directory: bool) -> None:
    sink = Posting(server.url)
    directory = tmp_path if in_directory else None
    run = tiny_run(callbacks=[ticking(Clock()), stopping(server, sink), sink], steps=STEPS, directory=directory)
    assert sorted(step for request in server.requests for step in request) == [*range(1, STEPS + 1)]
    assert server.rows == dict(EXPECTED)
    assert len({run_id for run_id, _, _ in sink.opened}) == 1
    assert [decision.what for decision in run.decisions] == ["failed", "recovered"]
    [fault] = run.faults
    assert str(fault).startswith("Posting failed in on_log")
    assert "is tried again" in str(fault)


def test_a_server_that_is_away_at_the_start_gets_all_rows_when_it_comes(server: Server, tmp_path: Path) -> None:
    server.stop()
    sink = Posting(server.url)
    come = on(Callback.on_step_end, at=100)(lambda run: server.start())
    run = tiny_run(callbacks=[ticking(Clock()), come, sink], steps=STEPS, directory=tmp_path)
    assert server.rows == dict(EXPECTED)
    assert (run.faults[0].moment, run.faults[0].at.step) == ("on_fit_start", 0)
    assert run.why("recovered").split(": ")[1].endswith("after step 0 went to it")


def test_attempts_get_rarer_up_to_five_minutes(tmp_path: Path) -> None:
    sink, clock, times = FailingCsv(), Clock(), list[float]()
    sink.broken = True

    class Watching(Callback):
        def on_step_end(self, run: Run) -> None:
            before = sink.attempts
            if clock.now in (1, 3, 7, 15, 31, 63, 127, 255, 511, 811, 1111):
                until(lambda: sink.attempts > before)
                times.append(clock.now)

    run = tiny_run(callbacks=[ticking(clock), sink, Watching()], steps=1200, directory=tmp_path)
    assert len(times) == 11
    assert sink.attempts == 1 + 11 + 1  # at the start, and at the end once more
    assert run.why("not sent").endswith(
        "1,200 records did not reach it. metrics.jsonl has them, and cadenza replay can write them"
    )
    assert [decision.what for decision in run.decisions] == ["failed", "not sent"]


def test_one_that_hangs_for_300_steps_gets_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CAPACITY", 20)
    go = Event()

    class Hanging(Csv):
        _writes_now = False

        def write(self, records: Sequence[Record]) -> None:
            if records[-1].step >= DOWN:
                assert go.wait(200)
            super().write(records)

    let_go = on(Callback.on_step_end, at=UP)(lambda run: go.set())
    run = tiny_run(callbacks=[ticking(Clock()), let_go, Hanging()], steps=STEPS, directory=tmp_path)
    assert rows_of_csv(run) == EXPECTED
    assert run.decisions == []


def test_images_that_came_during_the_outage_are_sent_too(server: Server, tmp_path: Path) -> None:
    sink = Posting(server.url)
    draw = on(Callback.on_step_end, every=50)(lambda run: run.log("image", Image(torch.zeros(3, 4, 4))))
    tiny_run(callbacks=[ticking(Clock()), draw, stopping(server, sink), sink], steps=STEPS, directory=tmp_path)
    assert sink.images == [*range(50, STEPS + 1, 50)]


def test_records_of_one_step_are_one_unit(server: Server, tmp_path: Path) -> None:
    @on(Callback.on_epoch_end)
    def log_epoch(run: Run) -> None:
        run.log("whole", run.progress.epoch)

    sink, again = FailingCsv(), FailingTensorBoard()
    callbacks = [ticking(Clock()), outage(sink, 4, 8), outage(again, 4, 8), log_epoch, sink, again]
    run = tiny_run(callbacks=callbacks, epochs=3, batches=4, directory=tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        found = [(int(row["step"]), row["number"], row["whole"]) for row in csv.DictReader(file)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row[0] for row in found] == [line["step"] for line in lines]
    assert rows_of_tensorboard(run) == [(line["step"], line["number"]) for line in lines if "number" in line]


def test_a_wrong_argument_ends_the_run_and_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("1")
    with pytest.raises(DirectoryError, match="is not overwritten"):
        tiny_run(callbacks=[Csv(tmp_path / "mine.csv")])


def test_only_a_sink_is_tried_again() -> None:
    with pytest.raises(CallbackError, match=r"'raise' or 'disable'; got 'retry'. Only a Sink is tried again"):

        class Mine(Callback):
            on_fault = "retry"


KILLED = """
import os, signal, sys
from cadenza import Callback, on
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer
from tests.sinks.outages import Clock, FailingCsv, FailingTensorBoard, outage, ticking

@on(Callback.on_step_end, at=250)
def kill(run):
    os.kill(os.getpid(), signal.SIGKILL)

table, board = FailingCsv(), FailingTensorBoard()
broken = [outage(table, end=1000), outage(board, end=1000)]
callbacks = [ticking(Clock()), *broken, table, board, Checkpoint(every="100 steps"), kill]
tiny_trainer(callbacks=callbacks, steps=400, directory=sys.argv[1]).fit()
"""


def test_a_run_that_was_killed_in_the_outage_sends_all_when_it_is_continued(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    callbacks = [ticking(Clock()), FailingCsv(), FailingTensorBoard(), Checkpoint(every="100 steps")]
    run = tiny_trainer(callbacks=callbacks, steps=STEPS, directory=tmp_path / "run").fit(resume="auto")
    assert rows_of_csv(run) == rows_of_tensorboard(run) == EXPECTED


def test_a_run_that_ended_in_the_outage_sends_the_rest_when_it_is_continued(server: Server, tmp_path: Path) -> None:
    def fit(*more: Callback, sink: Posting, steps: int) -> Run:
        callbacks = [ticking(Clock()), sink, *more, Checkpoint(every="100 steps")]
        return tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")

    first = Posting(server.url)
    run = fit(stopping(server, first, end=1000), sink=first, steps=300)
    assert re.search(r": \d+ records did not reach it", run.why("not sent"))
    server.start()
    fit(sink=Posting(server.url), steps=STEPS)
    assert sorted(step for request in server.requests for step in request) == [*range(1, STEPS + 1)]


def test_sinks_that_hang_at_the_end_share_one_patience_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "_END_HANGS_S", 0.05)
    go = Event()

    class Hanging(Csv):
        patience_s = 2.0

        def close(self, outcome: Outcome | None) -> None:
            assert outcome is None or go.wait(200)  # None: the table is written anew
            super().close(outcome)

    sinks = [Hanging(f"{number}.csv") for number in range(5)]
    sound = Csv()
    begun: list[float] = []
    note = on(Callback.on_fit_end)(lambda run: begun.append(time.monotonic()))
    run = tiny_run(callbacks=[ticking(Clock()), *sinks[:3], sound, *sinks[3:], note], steps=5, directory=tmp_path)
    waited = time.monotonic() - begun[0]
    go.set()
    assert 2.0 <= waited < 10.0  # each for itself would take 10 s
    assert [fault.callback for fault in run.faults] == ["Hanging#5", "Hanging#4", "Hanging#3", "Hanging#2", "Hanging"]
    shown = re.findall(r"waiting up to \d s for the last records of (.*)", capsys.readouterr().out)
    assert shown[-1] == "Hanging, Hanging#2, Hanging#3, Hanging#4, Hanging#5"
    assert rows_of_csv(run) == [(step, float(step)) for step in range(1, 6)]


def test_on_several_ranks_the_sink_of_the_main_process_is_tried_again(tmp_path: Path) -> None:
    def training() -> list[str]:
        sink = FailingCsv()

        class Outage(Callback):
            def on_step_end(self, run: Run) -> None:
                sink.broken = run.progress.step in (2, 3)

        callbacks = [ticking(Clock()), Outage(), sink]
        run = trainer_on_ranks(max_steps=6, callbacks=callbacks, directory=tmp_path).fit()
        return [decision.what for decision in run.decisions if decision.what in ("failed", "recovered")]

    assert launch(training) == [["failed", "recovered"], []]
    with (tmp_path / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [*range(1, 7)]
