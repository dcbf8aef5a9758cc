"""What a person sees in a terminal of 40, 60, 80 and 120 columns, in a pipe, and on a machine: an emulator shows the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import LogTraining
from cadenza.sinks import Console
from cadenza.status.folding import folded
from cadenza.testing import tiny_run
from tests.sinks.terminal import Screen, Terminal, shown_in_terminal

SCRIPT = """
import time
import torch
from torch import nn
from cadenza import Callback, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining, Profile, Summary, Warmup
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer

@on(Callback.on_step_end)
def long(run):
    run.log({"a/metric/with/a/rather/long/name": 1e-12, "größe": float(run.progress.step), "weights/norm": 12345.678})

torch.set_num_threads(1)
stop = EarlyStopping("eval/loss", mode="min", patience=2)
callbacks = [LogTraining("2 steps"), Evaluate(tiny_loader()), stop, Console(), Warmup("1 epoch"), Summary(), Profile(), long]
trainer = tiny_trainer(callbacks=callbacks, epochs=2)
print(trainer.plan())
trainer.fit()
"""
WIDTHS = pytest.mark.parametrize(
    "width", [40, pytest.param(60, marks=pytest.mark.long), pytest.param(80, marks=pytest.mark.long), 120]
)
BAR = """
@on(Callback.on_step_end)
def dawdle(run):
    time.sleep(0.02)

tiny_trainer(callbacks=[dawdle, Evaluate(tiny_loader()), ProgressBar("KIND", interval_s=0.01)], epochs=2).fit()
"""


@WIDTHS
def test_nothing_wraps(width: int) -> None:
    screen, written = shown_in_terminal(SCRIPT, width=width)
    lines = written.replace("\r\n", "\n").split("\n")
    assert not any("Traceback" in line for line in lines)
    assert max(len(line) for line in lines if "/name" not in line) <= width
    shown = screen.text
    assert any(line.startswith("finished after 2 epochs, 10 steps,") for line in shown)
    for whole in ("train/samples_per_s ", "weights/norm 12346", "Evaluate, on_epoch_end", "größe 4", "EarlyStopping >"):
        assert any(whole in line for line in shown), f"{whole!r} is cut at {width} columns"


@WIDTHS
@pytest.mark.parametrize("kind", ["rich", "tqdm"])
def test_a_bar_fits_and_leaves_one_line(kind: str, width: int) -> None:
    script = SCRIPT.partition("stop = ")[0] + BAR.replace("KIND", kind)
    screen, _ = shown_in_terminal(script, width=width)
    [line] = screen.text
    assert line.startswith("epoch 2/2")
    assert "10/10" in line
    assert "━" in line or "█" in line
    assert not line.endswith((",", "loss", "in", "steps")), "a fact is shown whole, or not at all"


RESIZED = """
import sys, tty
from cadenza.sinks.progress_rich import RichRenderer
from cadenza.sinks.progress_tqdm import TqdmRenderer
from cadenza.sinks.progress_view import Row

def rows(done):
    facts = ("loss 0.1234", "3.30 steps/s", "eta 0:14", "6.60 samples/s")
    return [Row("epoch 1/1", "step", done, 9, facts), Row("eval", "batch", done, 9, facts[1:])]

tty.setcbreak(0)
print("before")
renderer = KIND(stream="stderr")
renderer.open(rows(1))
for done in range(2, 7):
    sys.stdin.read(1)
    renderer.show(rows(done))
sys.stdin.read(1)
renderer.close(rows(9)[:1])
print("after")
"""


@pytest.mark.parametrize("kind", ["RichRenderer", "TqdmRenderer"])
def test_bars_leave_nothing_behind_when_the_window_gets_narrower_and_wider(kind: str) -> None:
    screen = Screen(width=100)
    with Terminal(RESIZED.replace("KIND", kind), width=100) as terminal:
        for done, width in enumerate((100, 60, 40, 30, 110), start=1):
            if done > 1:
                terminal.resize(width)
                screen.resize(width)
                terminal.press("x")
            screen.feed(terminal.read_until(rf"(?s){done}/9.*{done}/9[^\n]*(\?7h|\[A\r)\Z"))
            before, fit, evaluation = screen.text
            assert (before, fit[:9], evaluation[:4]) == ("before", "epoch 1/1", "eval")
            assert f" {done}/9" in fit
            assert done == 1 or ("samples/s" in fit) == (width >= 100), "a fact is shown where there is room"
        at = len(terminal.written)
        terminal.press("xx")
    assert terminal.exit_code == 0
    screen.feed(terminal.written[at:])
    assert [line[:9] for line in screen.text] == ["before", "epoch 1/1", "after"]
    assert screen.cursor_shown


def test_the_console_shows_the_throughput_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(callbacks=[LogTraining("5 steps"), Console()])
    line = capsys.readouterr().out.splitlines()[0]
    assert line.count("_per_s") == 1
    assert "train/samples_per_s" in line
    assert "train/steps_per_s" in run.history, "the record has both"


def test_the_console_shows_a_throughput_that_has_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log("own/steps_per_s", 3)

    tiny_run(callbacks=[log, Console()], steps=1)
    assert "own/steps_per_s 3" in capsys.readouterr().out


def test_the_file_of_a_run_has_whole_lines(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shown_in_terminal(SCRIPT.replace("epochs=2)", f"epochs=2, directory={str(directory)!r})"), width=40)
    lines = (directory / "console.log").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("epoch 0  step  2  train/loss") and line.endswith(" s") for line in lines)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_pipe_that_cannot_encode_all_letters_gets_escapes(encoding: str) -> None:
    script = SCRIPT + BAR.replace("KIND", "plain") + BAR.replace("KIND", "rich") + "run = tiny_run(steps=1); run.print('Δ')"
    with Terminal(script, width=None, variables={"PYTHONIOENCODING": encoding}) as pipe:
        pass
    assert pipe.exit_code == 0, pipe.written
    assert "\\u0394" in pipe.written
    assert "disabled" not in pipe.written


def test_a_line_is_folded_where_its_parts_end() -> None:
    line = "epoch 1  step 50  train/loss 0.4321  a/name/that/is/wider/than/the/screen 1"
    assert folded(line, 30).splitlines() == [
        "epoch 1  step 50",
        "    train/loss 0.4321",
        "    a/name/that/is/wider/than/the/screen",
        "    1",
    ]
    assert folded("\x1b[31m" + "red " * 20, 30).count("\n") == 0
    assert folded("short", 2) == "short"
    assert folded("  A > B > C and D", 20, " > ", indent="      ").splitlines() == ["  A > B > C and D"]
    assert folded("  Alpha > Beta > Gamma", 20, " > ", indent="      ").splitlines() == ["  Alpha > Beta >", "      Gamma"]


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    tiny_run(steps=1).print("x " * 40)
    assert capsys.readouterr().out == "x " * 40 + "\n"
