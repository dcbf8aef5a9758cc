"""``fit`` shows how far it is: a bar in a terminal, a line elsewhere, on stderr; ``progress=False`` shows nothing."""

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
def test_what_shows_the_progress_replaces_it(own: Callback) -> None:
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


def test_a_terminal_on_stderr_gets_the_bar_while_stdout_goes_to_a_file() -> None:
    script = "import sys, os\nsys.stdout = open(os.devnull, 'w')\nfrom cadenza.testing import tiny_trainer\n"
    screen, written = shown_in_terminal(script + "tiny_trainer(progress=True).fit()")
    assert "━" in written
    assert screen.lines[0].startswith("epoch 1/1")


def test_a_bar_within_another_does_not_disturb_the_run() -> None:
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
