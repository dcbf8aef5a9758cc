"""``cadenza watch``: runs in other processes, as a terminal, a pipe and another program see them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.commands import watch as watch_command
from cadenza.commands.following import Following
from cadenza.commands.main import main
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.going_on import going_on, kill, killed
from tests.waiting import until

ESCAPE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "over"
    stop = EarlyStopping("eval/loss", mode="max", patience=2)
    tiny_run(epochs=9, directory=directory, callbacks=[Evaluate(tiny_loader()), stop], seed=1)
    return directory


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("runs") / "dead")


def seen(directory: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, object]:
    assert main(["watch", str(directory), "--once", "--json"]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_that_is_over_is_shown_once_with_its_end(over: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(over)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [f"epoch {n}, step {5 * n}" for n in (1, 2, 3)]
    assert lines[3].startswith(f"{over}: stopped: 'eval/loss' did not get better")
    assert len(lines) == 4


def test_json_says_how_far_it_is_and_how_it_ended(over: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = seen(over, capsys)
    assert (found["state"], found["step"], found["steps"], found["epochs"]) == ("stopped", 15, 45, 9)
    assert found["fraction"] == pytest.approx(1 / 3)
    assert found["outcome"] == json.loads((over / "run.json").read_text())["outcome"]
    assert found["values"].keys() == found["best"].keys() == {"eval/loss"}  # type: ignore[attr-defined]


def test_a_killed_run_ends_the_watch_with_1_and_says_so(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(dead)]) == 1
    assert f"{dead}: killed: no process holds the directory and run.json has no outcome" in capsys.readouterr().out
    assert seen(dead, capsys, code=1)["state"] == "killed"


def after_the_first_update(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, when the command waits for its second update."""
    sleep = time.sleep

    def acting(seconds: float) -> None:
        monkeypatch.undo()
        act()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", acting)


def test_a_run_in_progress_is_followed_to_its_end_one_line_for_each_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    found = seen(tmp_path, capsys)
    assert (found["state"], found["step"], found["steps"]) == ("running", 4, 9)
    until(lambda: seen(tmp_path, capsys)["checkpoints"])
    after_the_first_update(monkeypatch, (tmp_path / "go").touch)
    assert main(["watch", str(tmp_path), "--every", "0.05"]) == 0
    process.join(300)
    out = capsys.readouterr().out
    steps = [int(number) for number in re.findall(r"step (\d+): number", out)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert out.endswith(f"{tmp_path}: finished: the limit is reached\n")
    assert "\x1b" not in out


def test_json_prints_a_line_for_each_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    after_the_first_update(monkeypatch, (tmp_path / "go").touch)
    assert main(["watch", str(tmp_path), "--every", "0.05", "--json"]) == 0
    process.join(300)
    updates = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (updates[0]["state"], updates[0]["step"]) == ("running", 4)
    assert (updates[-1]["state"], updates[-1]["step"], updates[-1]["fraction"]) == ("finished", 9, 1.0)
    assert sum(one["records"] for one in updates) == len((tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_watch_notices_that_the_run_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = going_on(tmp_path, 4)
    after_the_first_update(monkeypatch, lambda: kill(process))
    assert main(["watch", str(tmp_path), "--every", "0.05"]) == 1
    assert "killed" in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the state of a process is read from /proc")
def test_a_suspended_run_is_paused_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = going_on(tmp_path, 3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: seen(tmp_path, capsys)["state"] == "paused")
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: seen(tmp_path, capsys)["state"] == "running")
    kill(process)


def test_a_continued_run_goes_on_after_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path, waits_after=5)
    run = Following(tmp_path)
    assert [record.step for record in run.update()][-1] == 5
    process = going_on(tmp_path, 6)
    until(lambda: run.update() and run.state == "running")
    assert run.story.reached.step == 6
    assert list(run.story.series["number"].steps) == [1, 2, 3, 4, 5, 6]
    rates = run.rates()
    assert rates is None or rates[0] < 1000  # the pause before the resume does not count
    kill(process)


def test_a_run_without_files_yet_is_starting(tmp_path: Path) -> None:
    from cadenza.files.locking import FolderLock

    lock = FolderLock(tmp_path)
    run = Following(tmp_path)
    run.update()
    assert run.state == "starting"
    assert watch_command.lines(run, 60, 24)[0] == f"{tmp_path.name}: starting, epoch 0, step 0"
    lock.release()


def test_a_path_without_a_run_and_a_wrong_interval_are_errors(
    over: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"cadenza: {str(tmp_path)!r} is not a run directory")
    assert main(["watch", str(over), "--every", "nan"]) == 1
    assert capsys.readouterr().err == "cadenza: --every must be at least 0.05 seconds; got nan\n"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal_and_shows_the_values_first(over: Path, columns: int) -> None:
    run = Following(over)
    run.update()
    lines = watch_command.lines(run, columns, 24)
    assert max(map(len, lines)) <= columns
    assert lines[0] == "over: stopped, epoch 3 of 9, step 15 of 45"
    assert lines[1].endswith("] 33%")
    [row] = [line for line in lines if line.startswith("eval/loss")]
    assert "█" in row
    assert len(watch_command.lines(run, columns, 8)) <= 8


# -- a real terminal --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("runs") / "alive"
    process = going_on(directory, 5)
    yield directory
    kill(process)


def opened(directory: Path, columns: int, *more: str, term: str = "xterm-256color") -> pexpect.spawn:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return pexpect.spawn(
        sys.executable,
        ["-m", "cadenza", "watch", str(directory), "--every", "0.1", *more],
        dimensions=(24, columns),
        env={**environment, "TERM": term},
        encoding="utf-8",
        timeout=300,
    )


def widest_of_a_view(terminal: pexpect.spawn) -> int:
    terminal.expect_exact("step 5 of 9")
    terminal.expect_exact("checkpoint")
    return max(len(line) for line in ESCAPE.sub("", terminal.before).replace("\r", "").split("\n"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_in_a_terminal_nothing_wraps_also_after_a_resize_and_ctrl_c_is_quiet(alive: Path, columns: int) -> None:
    terminal = opened(alive, columns)
    terminal.expect_exact("step 5 of 9")
    terminal.expect_exact("the newest is step-0")
    widest = max(len(line) for line in ESCAPE.sub("", terminal.before).replace("\r", "").split("\n"))
    assert widest <= columns
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


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_dumb_terminal_gets_lines_without_escape_codes(alive: Path) -> None:
    terminal = opened(alive, 80, term="dumb")
    terminal.expect_exact("step 5: number 5")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    assert "\x1b" not in terminal.before
    terminal.close()
    assert terminal.exitstatus == 130


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_last_view_stays_when_the_run_ends(over: Path) -> None:
    terminal = opened(over, 80)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    last = ESCAPE.sub("", terminal.before.rpartition("\x1b[?1049l")[2])
    assert "over: stopped, epoch 3 of 9, step 15 of 45" in last
    assert "stopped: 'eval/loss' did not get better" in last
