"""``run.why_not`` says what a decision waits for: schedules, requests, monitors, disabled callbacks, the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining, TimeLimit
from cadenza.testing import launch, tiny_loader, tiny_run
from tests.distributed.parts import loader, trainer


def asked(what: str, *callbacks: Any, at: int = 2, **arguments: Any) -> str:
    """Return the answer at a step of a run of 5 steps in an epoch."""
    answers: list[str] = []

    @on(Callback.on_step_end, at=at)
    def ask(run: Run) -> None:
        answers.append(str(run.why_not(what)))

    tiny_run(callbacks=[*callbacks, ask], **{"epochs": 2, **arguments})
    return answers[0]


def test_a_schedule_says_when_it_is_due_next(tmp_path: Path) -> None:
    answer = asked("saved", Checkpoint("4 steps"), directory=tmp_path)
    assert (
        answer
        == "not 'saved' yet: Checkpoint, on_step_end, is due every 4 steps, next at step 4 at the earliest, now at step 2"
    )
    assert "next at step 3" in asked("LogTraining", LogTraining("3 steps"))
    assert "Evaluate, on_epoch_end, is due every epoch, now at epoch 0, step 2" in asked("evaluated", Evaluate(tiny_loader()))


def test_what_happened_before_is_said_first(tmp_path: Path) -> None:
    answer = asked("saved", Checkpoint("2 steps", background=False), directory=tmp_path, at=3)
    assert answer.startswith("saved by Checkpoint at epoch 0, step 2")
    assert "Not again since" in answer
    assert "next at step 4" in answer


def test_a_schedule_beyond_the_end_is_named(tmp_path: Path) -> None:
    assert "is due every 99 steps, which is never in this run: the run ends after 10 steps" in asked(
        "saved", Checkpoint("99 steps"), directory=tmp_path
    )


def test_nothing_decides_it() -> None:
    assert "no callback of this run does it on its own" in asked("saved")
    assert "no limit is reached" in asked("stopped")


def test_a_monitor_says_how_much_patience_is_left() -> None:
    callbacks = [Evaluate(tiny_loader(), every="1 step"), EarlyStopping("eval/loss", "max", patience=4)]
    assert "EarlyStopping: 2 of 4 evaluations without gain over 'eval/loss' =" in asked("stopped", *callbacks, at=3)
    other = Evaluate(tiny_loader(), every="1 step", name="test", when_better=("eval/loss", "max"))
    assert "'eval/loss' has not improved" in asked("Evaluate(test)", callbacks[0], other, at=3)


def test_a_request_waits_for_the_end_of_the_step() -> None:
    stop = on(Callback.on_step_end, at=2)(lambda run: run.stop("enough"))
    assert "requested by <lambda> (enough): it is carried out at the end of the step" in asked("stopped", stop)


def test_a_disabled_callback_is_named_with_its_error() -> None:
    class Fragile(Callback):
        on_fault = "disable"
        decides = ("exported",)

        def on_step_start(self, run: Run) -> None:
            raise ConnectionError("down")

    assert "Fragile failed in on_step_start" in (answer := asked("exported", Fragile()))
    assert "it is disabled" in answer
    assert "it is disabled" in asked("Fragile", Fragile())


def test_a_logged_name() -> None:
    evaluate = Evaluate(tiny_loader(), every="4 steps")
    assert "no evaluation 'eval' is complete; Evaluate, on_step_end, is due every 4 steps" in asked("logged eval/acc", evaluate)
    evaluate = Evaluate(tiny_loader(), every="1 step")
    assert "reports only eval/loss" in asked("logged eval/los", evaluate)
    assert "Did you mean 'eval/loss'?" in asked("logged eval/los", evaluate, at=3)
    assert "no record has 'train/los'. Did you mean 'train/loss'?" in asked("logged train/los", LogTraining("1 step"))
    assert "train/loss is " in asked("logged train/loss", LogTraining("1 step"), at=3)


def test_a_moment_and_the_end_of_a_run() -> None:
    assert "no callback of this run has a hook on_eval_end" in asked("on_eval_end")
    run = tiny_run(callbacks=[TimeLimit("3 h")])
    answer = run.why_not("stopped")
    assert not answer.happened
    assert answer.reasons[0] == "the run is over (finished: the limit is reached)"


def test_an_unknown_word_lists_the_words() -> None:
    run = tiny_run(callbacks=[LogTraining("1 step")])
    with pytest.raises(
        ValueError, match=r"got 'savd'\. Did you mean 'saved'\? Known in this run: stopped, .*LogTraining, logged NAME"
    ):
        run.why_not("savd")


@pytest.mark.parametrize(
    "build", [lambda: LogTraining("10%"), lambda: LogTraining("3 steps"), lambda: LogTraining("0.5 epoch")]
)
def test_asking_changes_nothing(build: Callable[[], Callback]) -> None:
    ask = on(Callback.on_step_end)(lambda run: str(run.why_not("LogTraining")))
    quiet, loud = (tiny_run(callbacks=[build(), *more], epochs=4).history["train/loss"] for more in ([], [ask]))
    assert quiet == loud


def test_one_rank_may_ask_alone() -> None:
    def work() -> str | None:
        answers: list[str] = []

        @on(Callback.on_step_end, at=1)
        def ask(run: Run) -> None:
            if run.driver.rank == 1:
                answers.append(str(run.why_not("evaluated")))

        trainer(loader(), callbacks=[Evaluate(loader(shuffle=False), every="2 steps"), ask], max_epochs=1).fit()
        return answers[0] if answers else None

    first, second = launch(work, 2)
    assert first is None
    assert second is not None
    assert "next at step 2" in second
