"""Console: a tidy line a record, in a terminal of 40 to 120 columns, in a pipe, and on a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cadenza import Callback, Histogram, Text, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import ScheduleError
from cadenza.sinks import Console
from cadenza.status.formats import folded
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.sinks.samples import failing
from tests.sinks.terminal import Screen, Terminal, shown_in_terminal

Lines = pytest.CaptureFixture[str]


def log_loss(every: str = "1 step") -> LogTraining:
    return LogTraining(every, lr=False, throughput=False)


log_step = on(Callback.on_step_end)(lambda run: run.log({"whole": run.progress.step, "small": 0.00012346, "tenth": 0.1}))


def without_times(lines: Lines) -> list[str]:
    """Return the lines shown, without the time at their end."""
    return [line.rpartition("  ")[0] if line.endswith(" s") else line for line in lines.readouterr().out.splitlines()]


def test_a_line_holds_epoch_step_values_and_time_and_lines_of_one_kind_stand_under_each_other(capsys: Lines) -> None:
    tiny_run(callbacks=[log_step, Console()], epochs=2, batches=5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1  step  1  whole 1  small 0.0001235  tenth 0.1  ")
    assert lines[0].endswith(" s")
    assert [line.rpartition("  ")[0] for line in lines[8:10]] == [
        "epoch 2  step  9  whole 9  small 0.0001235  tenth 0.1",
        "epoch 2  step 10  whole 10  small 0.0001235  tenth 0.1",
    ]


def test_an_evaluation_belongs_to_the_epoch_that_it_ends(capsys: Lines) -> None:
    tiny_run(callbacks=[Evaluate(tiny_loader()), Console()], epochs=2, batches=2)
    assert [line.split("  ")[:2] for line in without_times(capsys)[:2]] == [["epoch 1", "step 2"], ["epoch 2", "step 4"]]


def test_the_first_record_of_its_names_is_shown_also_in_a_run_that_continues(capsys: Lines, tmp_path: Path) -> None:
    """The first evaluation, at step 13, comes after the resume at step 11, and the second one two intervals later."""

    def train(directory: Path, *, steps: int) -> list[str]:
        callbacks = [Evaluate(tiny_loader(), "13 steps"), log_loss(), Checkpoint(), Console("10 steps")]
        tiny_trainer(callbacks=callbacks, steps=steps, directory=directory).fit(resume="auto")
        return [line for line in without_times(capsys) if line.startswith("epoch")]

    whole = train(tmp_path / "whole", steps=27)
    assert [line.split()[3] for line in whole if "eval/loss" in line] == ["13", "26"]
    assert train(tmp_path / "cut", steps=11) + train(tmp_path / "cut", steps=27) == whole


def test_media_are_named_on_request(capsys: Lines) -> None:
    log = on(Callback.on_step_end)(lambda run: run.log({"weights": Histogram(torch.ones(3)), "note": Text("x"), "a": 1}))
    tiny_run(callbacks=[log, Console(media=True)], steps=1)
    assert without_times(capsys)[0] == "epoch 1  step 1  a 1  histogram weights  text note"
    alone = on(Callback.on_step_end)(lambda run: run.log("note", Text("x")))
    tiny_run(callbacks=[log, Console()], steps=1)
    assert without_times(capsys)[0] == "epoch 1  step 1  a 1"
    tiny_run(callbacks=[alone, Console()], steps=1)
    assert without_times(capsys)[0].startswith("finished after")


def test_the_last_line_says_how_the_run_ended_after_what_was_logged_at_the_end(capsys: Lines, tmp_path: Path) -> None:
    stop = on(Callback.on_step_end, at=2)(lambda run: run.stop("enough"))
    late = on(Callback.on_fit_end)(lambda run: run.log("late", 1))
    tiny_run(callbacks=[Console(), late], epochs=2, batches=3)
    logged, finished = capsys.readouterr().out.splitlines()
    assert "late 1" in logged
    assert finished.startswith("finished after 2 epochs, 6 steps, ")
    assert finished.endswith(" s: the limit is reached")
    tiny_run(callbacks=[stop, Console()], directory=tmp_path / "run")
    [stopped] = capsys.readouterr().out.splitlines()
    assert stopped.startswith("stopped after 2 steps, in epoch 1, ")
    assert stopped.endswith(" s: enough")
    assert (tmp_path / "run" / "console.log").read_text().splitlines() == [stopped]
    with pytest.raises(KeyError):
        tiny_run(callbacks=[failing(2, KeyError("on purpose")), Console()])
    assert ": KeyError('on purpose')" in capsys.readouterr().out.splitlines()[-1]


def test_every_thins_out_each_kind_of_record_by_itself(capsys: Lines) -> None:
    evaluate = Evaluate(tiny_loader(), every="1 epoch")
    tiny_run(callbacks=[log_loss(), evaluate, Console(every="4 steps")], epochs=2, batches=4)
    shown = [line.split("  ")[1:] for line in without_times(capsys)[:-1]]
    assert [(step, value.split(" ")[0]) for step, value in shown] == [
        ("step 4", "train/loss"),
        ("step 4", "eval/loss"),
        ("step 8", "train/loss"),
        ("step 8", "eval/loss"),
    ]


def test_one_console_serves_several_runs(capsys: Lines) -> None:
    console = Console(every="2 steps")
    tiny_run(callbacks=[log_loss(), console], steps=2)
    first = without_times(capsys)
    tiny_run(callbacks=[log_loss(), console], steps=2)
    assert without_times(capsys)[:-1] == first[:-1]
    assert len(first) == 2


def test_a_cadence_that_cannot_be_parsed_or_that_this_run_cannot_count_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"unknown unit 'stps'\. Did you mean 'steps'"):
        Console(every="5 stps")
    with pytest.raises(ScheduleError, match="needs a loader that knows its length"):
        tiny_run(callbacks=[Console(every="0.5 epoch")], loader=iter(tiny_loader()), steps=2)


def test_a_terminal_that_is_gone_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # closing it fails, too
    monkeypatch.setattr(sys, "stdout", full)
    run = tiny_run(callbacks=[log_loss(), Console()], epochs=2)
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert [(fault.callback, fault.moment) for fault in run.faults] == [("Console", "on_log")]
    assert (run.outcome and run.outcome.kind) == "finished"


def test_epochs_have_a_line_at_their_start_and_one_at_their_end(capsys: Lines) -> None:
    tiny_run(callbacks=[Evaluate(tiny_loader()), Console(epochs=True)], epochs=3, steps=5, batches=3)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.rpartition(", ")[0] if " after " in line else line.split("  eval")[0] for line in lines]
    assert shown[:-1] == [
        "epoch 1 of 3 begins",
        "epoch 1 is over after 3 steps",
        "epoch 1  step 3",
        "epoch 2 of 3 begins",
        "epoch 2 is left after 2 steps",
    ]
    tiny_run(callbacks=[Console(epochs=True)], steps=1, batches=3)  # without a limit of epochs
    begins, left, _ = capsys.readouterr().out.splitlines()
    assert begins == "epoch 1 begins"
    assert left.startswith("epoch 1 is left after 1 step, ")


# -- on the screen: an emulator shows what a person sees -----------------------------------------------

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
from cadenza.sinks.progress_renderers import RichRenderer, Row
from cadenza.trackers.tqdm_renderer import TqdmRenderer

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


def test_the_console_shows_the_throughput_once_and_one_that_has_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(callbacks=[LogTraining("5 steps"), Console()])
    line = capsys.readouterr().out.splitlines()[0]
    assert line.count("_per_s") == 1
    assert "train/samples_per_s" in line
    assert "train/steps_per_s" in run.history, "the record has both"
    log = on(Callback.on_step_end)(lambda run: run.log("own/steps_per_s", 3))
    tiny_run(callbacks=[log, Console()], steps=1)
    assert "own/steps_per_s 3" in capsys.readouterr().out


def test_the_file_of_a_run_has_whole_lines(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shown_in_terminal(SCRIPT.replace("epochs=2)", f"epochs=2, directory={str(directory)!r})"), width=40)
    lines = (directory / "console.log").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("epoch 1  step  2  train/loss") and line.endswith(" s") for line in lines)


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
