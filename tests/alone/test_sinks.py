"""Sinks of a run that is killed, interrupted or hangs: what was logged arrives, and the end does not wait for long."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.records import writer
from cadenza.records.writer import Writer
from cadenza.sinks import Csv
from cadenza.status.decisions import Outcome
from cadenza.status.run_info import RunInfo
from cadenza.testing import tiny_run, tiny_trainer
from tests.forked import start
from tests.sinks.outages import EXPECTED, STEPS, FailingCsv, FailingTensorBoard, Outage, Ticking
from tests.sinks.readers import CSV, QUIET, TENSORBOARD, OfMlflow
from tests.sinks.samples import logging, metrics_of
from tests.sinks.terminal import shown_in_terminal
from tests.sinks.trackers import in_own_process


def train_and_die(directory: Path) -> None:
    """Train with two sinks that fail from step 50 on; the process is killed at step 250."""
    table, board = FailingCsv(), FailingTensorBoard()
    kill = on(Callback.on_step_end, at=250)(lambda run: os.kill(os.getpid(), signal.SIGKILL))
    callbacks = [Ticking(), Outage(table, end=1000), Outage(board, end=1000), table, board, Checkpoint(every="100 steps"), kill]
    tiny_trainer(callbacks=callbacks, steps=STEPS, directory=directory).fit()


def test_a_run_that_was_killed_in_the_outage_sends_all_when_it_is_continued(tmp_path: Path) -> None:
    killed = start(train_and_die, tmp_path / "run", output=tmp_path / "written")
    assert killed.ended() == -signal.SIGKILL, killed.said()
    callbacks = [Ticking(), FailingCsv(), FailingTensorBoard(), Checkpoint(every="100 steps")]
    run = tiny_trainer(callbacks=callbacks, steps=STEPS, directory=tmp_path / "run").fit(resume="auto")
    assert CSV.values(run.info)["number"] == TENSORBOARD.values(run.info)["number"] == EXPECTED


def test_a_service_of_wandb_that_is_killed_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    kill = "[one.kill() for one in psutil.Process().children() if one.name() == 'wandb-core']"
    end = "os._exit(0)"  # wandb would tell at exit that its service is gone
    sink = f"Wandb('tests', mode='offline', settings={QUIET})"
    variables = {"WANDB_ERROR_REPORTING": "false"}
    ended = in_own_process(sink, tmp_path, variables, offline=False, act=kill, steps=300, end=end)
    [fault] = ended.faults
    assert "Connection" in fault or "Broken" in fault
    assert ended.outcome == "finished"
    assert ended.written.count("Wandb failed in") == 1
    assert len(metrics_of(tmp_path / "run")) == 300


def test_a_signal_ends_a_run_of_mlflow_as_killed(tmp_path: Path) -> None:
    reader, facts = OfMlflow(), list[RunInfo]()
    reader.uri = f"sqlite:///{tmp_path}/mlflow.db"

    @on(Callback.on_step_end, at=2)
    def terminate(run: Run) -> None:
        facts.append(run.info)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        tiny_run(callbacks=[logging({"a": 1}), Checkpoint(), terminate, reader.make()], directory=tmp_path)
    assert reader.outcome(facts[0]) == "KILLED"
    assert reader.values(facts[0])["a"] == [(1, 1), (2, 1)]


def test_a_keyboard_interrupt_leaves_the_terminal_clean() -> None:
    script = """
import os, signal, sys, time
from cadenza import Callback, on
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import tiny_trainer

@on(Callback.on_step_end, at=4)
def interrupt(run):
    print("begun", end="")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

try:
    tiny_trainer(callbacks=[interrupt, Console(), ProgressBar(interval_s=0.01)], batches=6).fit()
except KeyboardInterrupt:
    print("it came through", file=sys.stderr)
"""
    screen, _ = shown_in_terminal(script)
    assert screen.cursor_shown
    begun, bar, outcome, through, after = screen.lines
    assert (begun, through, after) == ("begun", "it came through", "")
    assert re.match(r"epoch 0/1  [━╸ ]+  4/6   66%  failed  loss ", bar)
    assert re.fullmatch(r"failed after 0 epochs, 4 steps, .*: KeyboardInterrupt\(\)", outcome)


# -- the deadline of the last records -----------------------------------------------------------------


def test_a_close_within_its_time_is_waited_for_and_one_that_takes_too_long_is_an_error() -> None:
    channel = Writer().channel(lambda records: None)
    channel.ask_close(lambda: time.sleep(0.05))
    channel.finish(60.0)
    assert channel.over
    go, begin = threading.Event(), time.monotonic()
    channel = Writer().channel(lambda records: None)
    channel.ask_close(lambda: go.wait(120))
    with pytest.raises(TimeoutError, match=r"not written within 0\.1 s"):
        channel.finish(0.1)
    assert 0.1 <= time.monotonic() - begin < 60.0
    go.set()


def test_sinks_that_hang_at_the_end_share_one_patience_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "_END_HANGS_S", 0.05)
    go = threading.Event()

    class Hanging(Csv):
        patience_s = 1.0

        def close(self, outcome: Outcome | None) -> None:
            assert outcome is None or go.wait(200)  # None: the table is written anew
            super().close(outcome)

    sinks = [Hanging(f"{number}.csv") for number in range(5)]
    begun: list[float] = []
    note = on(Callback.on_fit_end)(lambda run: begun.append(time.monotonic()))
    callbacks = [Ticking(), *sinks[:3], Csv("own.csv"), *sinks[3:], note]
    run = tiny_run(callbacks=callbacks, steps=5, directory=tmp_path)
    waited = time.monotonic() - begun[0]
    go.set()
    assert 1.0 <= waited < 5.0  # each for itself would take 5 s
    assert [fault.callback for fault in run.faults] == ["Hanging#5", "Hanging#4", "Hanging#3", "Hanging#2", "Hanging"]
    shown = re.findall(r"waiting up to \d s for the last records of (.*)", capsys.readouterr().out)
    assert shown[-1] == "Hanging, Hanging#2, Hanging#3, Hanging#4, Hanging#5"
    assert CSV.values(run.info)["number"] == [(step, float(step)) for step in range(1, 6)]
