"""A terminal that closes, or a connection that is lost, sends SIGHUP: the run is saved, as after SIGTERM."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path
from typing import Any

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint
from cadenza.status.encoding import first_difference
from cadenza.testing import tiny_run
from tests import forked
from tests.alone.test_preemption import final, main, outcome, started, step_of_newest
from tests.alone.test_preemption import whole as whole


def in_terminal(terminal: str, directory: Path) -> None:
    """Train with a terminal that this process controls, and with all that is written there."""
    file = os.open(terminal, os.O_RDWR)  # the process leads a session without a terminal
    for number in (0, 1, 2):
        os.dup2(file, number)
    main(directory, "outside", signal.SIGHUP)


def test_a_terminal_that_closes_ends_the_step_saves_and_the_run_continues(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory, (screen, end) = tmp_path / "run", pty.openpty()
    directory.mkdir()
    process = forked.start(in_terminal, os.ttyname(end), directory, output=tmp_path / "output.txt")
    shown = ""
    while "ready" not in shown:
        shown += os.read(screen, 4096).decode()
    os.close(end)
    os.close(screen)  # the system sends SIGHUP, and what is written from now on is an error
    assert process.ended() == 128 + signal.SIGHUP
    assert outcome(directory) == {"kind": "preempted", "reason": "signal SIGHUP"}
    assert first_difference(final(directory), whole) is None


def test_a_second_hangup_does_not_end_the_step(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "twice", signal.SIGHUP)
    assert process.ended() == 128 + signal.SIGHUP
    assert (tmp_path / "run" / "after the second").exists()
    assert step_of_newest(tmp_path / "run") == 8


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hangup = on(Callback.on_step_end, at=1)(lambda run: os.kill(os.getpid(), signal.SIGHUP))
        run = tiny_run(directory=tmp_path, steps=2, callbacks=[Checkpoint(), hangup])
        assert run.outcome is not None
        assert run.outcome.kind == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)
