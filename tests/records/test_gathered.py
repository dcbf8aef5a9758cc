"""Records that are written many at once: what a kill loses, and that nothing else loses any."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.records.logs import GATHER_S, LONGEST_S, GatheredLog
from cadenza.testing import tiny_run, tiny_trainer


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train(directory: Path, kill_at: int = -1) -> None:
    """Log every step, and save every 20 steps."""

    @on(Callback.on_step_end)
    def step(run: Run) -> None:
        if run.progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [LogTraining("1 step", throughput=False), Checkpoint("20 steps"), step]
    tiny_trainer(callbacks=callbacks, steps=60, seed=1, directory=directory).fit(resume="auto")


def test_a_kill_loses_no_record_of_a_checkpoint_and_the_resumed_run_has_every_record_once(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    killed = multiprocessing.get_context("spawn").Process(target=train, args=(tmp_path / "killed", 55))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    steps = [row["step"] for row in rows(tmp_path / "killed")]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 40, "a checkpoint writes the records before it"
    train(tmp_path / "killed")
    whole, again = ([{**row, "time": 0} for row in rows(tmp_path / name)] for name in ("whole", "killed"))
    assert again == whole
    assert len(again) == 60


def test_no_line_waits_longer_than_the_bound_if_the_thread_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatheredLog, "_work", lambda self: None)  # a thread that gets no time
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "metrics.jsonl"
    log = GatheredLog(path)
    for number in range(300):
        log.add(f"{number}")
        written = path.read_text().splitlines()
        assert number - len(written) < LONGEST_S / 0.01 + 2
        now[0] += 0.01
    log.end()
    assert path.read_text().splitlines() == [str(number) for number in range(300)]


def test_lines_that_come_seldom_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = GatheredLog(tmp_path / "log")
    for number in range(3):
        log.add("line")
        assert len((tmp_path / "log").read_text().splitlines()) == number + 1
        now[0] += 1.01 * GATHER_S
    log.end()
    assert not [one for one in threading.enumerate() if one.name == "cadenza-records"]


def test_lines_of_many_threads_are_all_written_once_and_in_order(tmp_path: Path) -> None:
    log = GatheredLog(tmp_path / "log")

    def add() -> None:
        for number in range(500):
            log.add(f"{number}")

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = [threading.Thread(target=add) for _ in range(3)]
        for one in adding:
            one.start()
        while any(one.is_alive() for one in adding):
            log.flush()
        log.end()
    finally:
        sys.setswitchinterval(switch)
    lines = [int(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(lines) == sorted([*range(500)] * 3)


def test_lines_wait_in_memory_while_the_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.mkdir()
    log = GatheredLog(path)
    for number in range(3):
        log.add(f"{number}")
    log.flush()
    path.rmdir()
    log.end()
    assert path.read_text().splitlines() == ["0", "1", "2"]
    assert caplog.text.count("wait in memory") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_error_loses_no_record(tmp_path: Path, error: type[BaseException]) -> None:
    @on(Callback.on_step_start, at=7)
    def fail(run: Run) -> None:
        raise error

    with pytest.raises(error):
        tiny_run(callbacks=[LogTraining("1 step"), fail], steps=10, directory=tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]


ABANDONED = """
import sys
from pathlib import Path
from cadenza.records.logs import GatheredLog
log = GatheredLog(Path(sys.argv[1]))
for number in range(100):
    log.add(f"{number}")
"""


def test_a_process_that_exits_without_an_end_loses_no_line(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ABANDONED, str(tmp_path / "log")], check=True)
    assert len((tmp_path / "log").read_text().splitlines()) == 100


def test_the_thread_has_ended_when_the_run_has(tmp_path: Path) -> None:
    running: list[bool] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        running.append(any(one.name == "cadenza-records" for one in threading.enumerate()))

    for number in range(20):
        tiny_run(directory=tmp_path / str(number), steps=5, callbacks=[LogTraining("1 step"), look])
        assert not [one for one in threading.enumerate() if one.name == "cadenza-records"]
    assert any(running)
