"""Records that are written many at once: what a kill loses, and that nothing else loses any."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import LogTraining
from cadenza.records.logs import GATHER_S, LONGEST_S, GatheredLog
from cadenza.testing import tiny_run


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


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


def test_a_process_that_exits_without_an_end_loses_no_line(tmp_path: Path) -> None:
    lines = "from pathlib import Path\nfrom cadenza.records.logs import GatheredLog\nlog = GatheredLog(Path('log'))\n"
    code = f"{lines}for number in range(100):\n    log.add(f'{{number}}')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert len((tmp_path / "log").read_text().splitlines()) == 100


def test_the_thread_has_ended_when_the_run_has(tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "cadenza-records"]

    running: list[list[str]] = []
    look = on(Callback.on_step_end)(lambda run: running.append(threads()))
    for number in range(20):
        tiny_run(directory=tmp_path / str(number), steps=5, callbacks=[LogTraining("1 step"), look])
        assert threads() == []
    assert any(running)
