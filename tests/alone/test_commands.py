"""Commands and signals: Ctrl-C in a terminal, a run that is suspended, SIGTERM for the command of a container."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from cadenza.commands.main import main
from tests.commands.parts import Command, going_on, let_die
from tests.commands.test_watch import finished, seen
from tests.forked import start
from tests.recipes.test_pages import ENTRYPOINT, FILE
from tests.waiting import until

from ..commands.conftest import cadenza  # noqa: F401  # a fixture

ESCAPE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal and signals of POSIX")


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("runs") / "alive"
    process = going_on(directory, 5)
    yield directory
    let_die(directory, process)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the state of a process is read from /proc")
def test_a_suspended_run_is_paused_and_goes_on(tmp_path: Path, cadenza: Command) -> None:  # noqa: F811
    process = going_on(tmp_path, 3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: seen(tmp_path, cadenza)["state"] == "paused")
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: seen(tmp_path, cadenza)["state"] == "running")
    let_die(tmp_path, process)


# -- watch in a terminal -------------------------------------------------------------------------------


def opened(directory: Path, columns: int, term: str = "xterm-256color") -> pexpect.spawn:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return pexpect.spawn(
        sys.executable,
        ["-m", "cadenza", "watch", str(directory), "--every", "0.1"],
        dimensions=(24, columns),
        env={**environment, "TERM": term},
        encoding="utf-8",
        timeout=300,
    )


def widest(terminal: pexpect.spawn) -> int:
    return max(len(line) for line in ESCAPE.sub("", terminal.before).replace("\r", "").split("\n"))


def widest_of_a_view(terminal: pexpect.spawn) -> int:
    terminal.expect_exact("step 5 of 9")
    terminal.expect_exact("checkpoint")
    return widest(terminal)


@pytest.mark.parametrize("columns", [pytest.param(60, marks=pytest.mark.long), 80, pytest.param(120, marks=pytest.mark.long)])
def test_in_a_terminal_nothing_wraps_also_after_a_resize_and_ctrl_c_is_quiet(alive: Path, columns: int) -> None:
    terminal = opened(alive, columns)
    terminal.expect_exact("step 5 of 9")
    terminal.expect_exact("the newest is step-0")
    assert widest(terminal) <= columns
    terminal.setwinsize(24, 40)
    until(lambda: widest_of_a_view(terminal) <= 40)  # views of before the resize can still come
    assert widest_of_a_view(terminal) <= 40
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert "Traceback" not in terminal.before
    assert "interrupted" not in terminal.before
    assert "\x1b[?1049l" in terminal.before  # back from the alternate screen


def test_a_dumb_terminal_gets_lines_without_escape_codes(alive: Path) -> None:
    terminal = opened(alive, 80, term="dumb")
    terminal.expect_exact("step 5: number 5")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    assert "\x1b" not in terminal.before
    terminal.close()
    assert terminal.exitstatus == 130


def test_the_last_view_stays_when_the_run_ends(tmp_path: Path) -> None:
    terminal = opened(finished(tmp_path / "over"), 80)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    last = ESCAPE.sub("", terminal.before.rpartition("\x1b[?1049l")[2])
    assert "over: stopped, epoch 3 of 9, step 15 of 45" in last
    assert "stopped: 'eval/loss' did not get better" in last


# -- trainings that are asked to end -------------------------------------------------------------------


def demo(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(["demo", "--directory", str(directory)]))


def test_ctrl_c_ends_the_demo_without_a_traceback_and_the_run_directory_says_so(tmp_path: Path) -> None:
    process = start(demo, tmp_path / "run", output=tmp_path / "written")
    process.until_it_says("\nepoch")
    os.kill(process.pid, signal.SIGINT)
    assert process.ended() == 130
    assert "\nCtrl-C: the run is saved and ends when the step under way is complete." in process.said()
    assert "Traceback" not in process.said()
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]
    assert outcome == {"kind": "interrupted", "reason": "signal SIGINT"}
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def contained(*arguments: str) -> None:
    os.chdir(FILE.parent)
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def test_sigterm_ends_the_command_of_a_container_with_a_checkpoint_and_the_next_start_continues(tmp_path: Path) -> None:
    program, script, directory = ENTRYPOINT
    assert (program, script) == ("python", "train.py")
    run = tmp_path / Path(directory).name
    first = start(contained, script, str(run), "4000", output=tmp_path / "first")
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text())
    os.kill(first.pid, signal.SIGTERM)
    assert first.ended() == 128 + signal.SIGTERM, first.said()
    assert json.loads((run / "run.json").read_text())["outcome"]["kind"] == "preempted"
    reached = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["epoch"]
    again = start(contained, script, str(run), str(reached + 1), output=tmp_path / "again")
    assert again.ended() == 0, again.said()
    assert "kind='finished'" in again.said()
    assert json.loads((run / "run.json").read_text())["continued"]
