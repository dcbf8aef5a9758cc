"""Console: a tidy line a record."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cadenza import Callback, Histogram, Run, Text, on
from cadenza.callbacks import Evaluate, LogTraining
from cadenza.errors import ScheduleError
from cadenza.sinks import Console
from cadenza.testing import check_callback, tiny_loader, tiny_run

Lines = pytest.CaptureFixture[str]


def log_loss(every: str = "1 step") -> LogTraining:
    return LogTraining(every, lr=False, throughput=False)


@on(Callback.on_step_end)
def log_step(run: Run) -> None:
    run.log({"whole": run.progress.step, "small": 0.00012346, "tenth": 0.1})


def without_times(lines: Lines) -> list[str]:
    """Return the lines shown, without the time at their end."""
    return [line.rpartition("  ")[0] if line.endswith(" s") else line for line in lines.readouterr().out.splitlines()]


def test_a_line_holds_epoch_step_values_and_time_and_lines_of_one_kind_stand_under_each_other(capsys: Lines) -> None:
    tiny_run(callbacks=[log_step, Console()], epochs=2, batches=5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 0  step  1  whole 1  small 0.0001235  tenth 0.1  ")
    assert lines[0].endswith(" s")
    assert [line.rpartition("  ")[0] for line in lines[8:10]] == [
        "epoch 1  step  9  whole 9  small 0.0001235  tenth 0.1",
        "epoch 1  step 10  whole 10  small 0.0001235  tenth 0.1",
    ]


def test_an_evaluation_belongs_to_the_epoch_that_it_ends(capsys: Lines) -> None:
    tiny_run(callbacks=[Evaluate(tiny_loader()), Console()], epochs=2, batches=2)
    assert [line.split("  ")[:2] for line in without_times(capsys)[:2]] == [["epoch 1", "step 2"], ["epoch 2", "step 4"]]


def test_media_are_named(capsys: Lines) -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log({"weights": Histogram(torch.ones(3)), "note": Text("x"), "a": 1})

    tiny_run(callbacks=[log, Console()], steps=1)
    assert without_times(capsys)[0] == "epoch 0  step 1  a 1  histogram weights  text note"


def test_the_last_line_says_how_the_run_ended_after_what_was_logged_at_the_end(capsys: Lines, tmp_path: Path) -> None:
    stop = on(Callback.on_step_end, at=2)(lambda run: run.stop("enough"))
    late = on(Callback.on_fit_end)(lambda run: run.log("late", 1))

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise KeyError("on purpose")

    tiny_run(callbacks=[Console(), late], epochs=2, batches=3)
    logged, finished = capsys.readouterr().out.splitlines()
    assert "late 1" in logged
    assert finished.startswith("finished after 2 epochs, 6 steps, ")
    assert finished.endswith(" s: the limit is reached")
    tiny_run(callbacks=[stop, Console()], directory=tmp_path / "run")
    [stopped] = capsys.readouterr().out.splitlines()
    assert stopped.startswith("stopped after 0 epochs, 2 steps, ")
    assert stopped.endswith(" s: enough")
    assert (tmp_path / "run" / "console.log").read_text().splitlines() == [stopped]
    with pytest.raises(KeyError):
        tiny_run(callbacks=[fail, Console()])
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
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(Console)


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
