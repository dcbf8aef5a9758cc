"""By default, ``fit`` shows a bar in a terminal or notebook, else lines on stderr. ``progress=False`` shows nothing."""

from __future__ import annotations

import pytest

from cadenza import Callback
from cadenza.callbacks import FindLearningRate, LogTraining
from cadenza.compat.accelerated.callbacks import PrintProgressCallback
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import tiny_trainer
from tests.sinks.terminal import shown_in_terminal

NOTE = "progress bar (default; progress=False turns it off)"


def test_the_trainer_adds_a_bar_and_the_plan_says_so() -> None:
    trainer = tiny_trainer(progress=True)
    assert [type(one) for one in trainer.callbacks] == [ProgressBar]
    assert NOTE in str(trainer.plan())
    quiet = tiny_trainer(progress=False)
    assert quiet.callbacks == []
    assert "progress bar" not in str(quiet.plan())


@pytest.mark.parametrize("own", [ProgressBar("plain"), Console(), PrintProgressCallback()])
def test_a_callback_that_shows_progress_replaces_it(own: Callback) -> None:
    trainer = tiny_trainer(progress=True, callbacks=[LogTraining(1), own])
    assert trainer.callbacks[-1] is own
    assert NOTE not in str(trainer.plan())


def test_without_a_terminal_a_run_shows_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_trainer(progress=True, epochs=2, callbacks=[FindLearningRate(steps=10)]).fit()
    out, err = capsys.readouterr()
    assert run.progress.step == 10
    assert err.startswith("epoch 2/2  step 10/10  100%  loss ")  # and none for the trial of rates
    assert err.count("\n") == 1
    assert "epoch" not in out


def test_progress_false_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_trainer(progress=False).fit()
    assert capsys.readouterr() == ("", "")


def test_warnings_and_logs_do_not_tear_the_bars_on_stderr_and_each_bar_leaves_one_line() -> None:
    script = """
import logging, os, sys, time, warnings
sys.stdout = open(os.devnull, "w")
logging.basicConfig(format="%(message)s")
warnings.simplefilter("always")
warnings.formatwarning = lambda message, *_: f"{message}\\n"
from cadenza import Callback, on
from cadenza.testing import tiny_loader, tiny_trainer

@on(Callback.on_step_end)
def talk(run):
    warnings.warn(f"warned in step {run.progress.step}")
    logging.getLogger("script").warning(f"logged in step {run.progress.step}")
    print("printed to a file")
    time.sleep(0.01)

trainer = tiny_trainer(progress=True, callbacks=[talk], batches=2)
trainer.callbacks[-1].interval_s = 0.001
trainer.fit()
trainer.fit()
trainer.evaluate(tiny_loader(3))
trainer.predict(tiny_loader(4), compute=lambda model, batch: model(batch[0]))
"""
    screen, written = shown_in_terminal(script, width=200)
    assert "━" in written
    assert screen.cursor_shown
    spoken = [line for step in (1, 2) for line in (f"warned in step {step}", f"logged in step {step}")]
    assert [line for line in screen.lines if line in spoken] == spoken * 2
    starts = ["epoch 1/1  ━", "this trainer has trained 2 steps", "epoch 1/1  ━", "eval  ━", "predict  ━", ""]
    others = [line for line in screen.lines if line not in spoken]
    assert [line[: len(start)] for line, start in zip(others, starts, strict=True)] == starts


def test_a_run_inside_another_run_shows_lines_below_its_bar() -> None:
    script = """
from cadenza import Callback, on
from cadenza.testing import tiny_trainer

@on(Callback.on_epoch_end)
def another(run):
    assert tiny_trainer(progress=True).fit().faults == []

run = tiny_trainer(progress=True, callbacks=[another]).fit()
print("faults", run.faults)
"""
    screen, _ = shown_in_terminal(script)
    assert "faults []" in screen.lines
    assert sum(line.startswith("epoch 1/1") for line in screen.lines) == 2
