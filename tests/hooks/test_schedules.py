"""Schedules in words: what can be read, when they fire, and when they never can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import Counters, Progress
from cadenza.callbacks import LogTraining
from cadenza.errors import ScheduleError
from cadenza.hooks.schedule import FORMS, At, Every, Schedule, When
from cadenza.testing import tiny_run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("500 steps", "every 500 steps"),
        ("1 step", "every step"),
        ("1 epoch", "every epoch"),
        ("0.25 epoch", "every 0.25 epoch"),
        ("2000 batches", "every 2000 batches"),
        ("50_000 samples", "every 50000 samples"),
        ("30 s", "every 30 s"),
        ("10 min", "every 10 min"),
        ("1.5 h", "every 1.5 h"),
        ("  3   epochs ", "every 3 epochs"),
        (500, "every 500 steps"),
        ("90 seconds", "every 1.5 min"),
    ],
)
def test_all_forms_can_be_read(text: str, said: str) -> None:
    assert str(Schedule.parse(text)) == said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("500 stps", r"unknown unit 'stps'\. Did you mean 'steps'\?"),
        ("500 Steps", r"unknown unit 'Steps'\. Did you mean 'steps'\?"),
        ("3 fortnights", r"unknown unit 'fortnights'\."),
        ("often", "expected a number and a unit"),
        ("500", r"expected a number and a unit\. Did you mean 500, without quotes\?"),
        ("-5 steps", "expected a number and a unit"),
        ("", "expected a number and a unit"),
        ("0.5 steps", "steps come in whole numbers"),
        ("1.5 samples", "samples come in whole numbers"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_shows_the_forms(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem) as caught:
        Schedule.parse(text)
    assert FORMS in str(caught.value)


def test_nothing_at_all_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"'0 steps' is no schedule: the number must be greater than 0"):
        Schedule.parse("0 steps")


def steps_of(every: Any, **arguments: Any) -> list[int]:
    """Return the steps at which a schedule fires: 2 epochs of 5 batches of 2 samples, unless told otherwise."""
    run = tiny_run(callbacks=[LogTraining(every=every, lr=False, throughput=False)], **{"epochs": 2, **arguments})
    return [step for step, _ in run.history["train/loss"]] if "train/loss" in run.history else []


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("3 steps", [3, 6, 9]),
        ("1 epoch", [5, 10]),
        ("2 epochs", [10]),
        ("4 batches", [4, 8]),
        ("6 samples", [3, 6, 9]),
        ("5 samples", [3, 5, 8, 10]),  # on crossing
        ("3 samples", [2, 3, 5, 6, 8, 9]),
        ("0.4 epoch", [2, 4, 6, 8, 10]),
        ("0.5 epoch", [3, 5, 8, 10]),
        ("1.5 epochs", [8]),
        (lambda run: run.progress.step in (1, 7), [1, 7]),
        ("3 h", []),
    ],
)
def test_a_schedule_fires_on_crossing(every: Any, expected: list[int]) -> None:
    assert steps_of(every) == expected


def test_batches_are_asked_about_at_the_end_of_steps() -> None:
    assert steps_of("3 batches", accumulate=2, epochs=1, batches=6) == [2, 3]


def test_time_fires_at_the_first_step_after_it() -> None:
    assert steps_of("0.000001 s") == [*range(1, 11)]


def passed(schedule: Any, progress: Progress) -> bool:
    class Resumed:
        """All of a run that a filter looks at."""

    run: Any = Resumed()
    run.progress = progress
    due = schedule.timer().due
    due(run)  # the first question, at the counters of the resume itself
    progress.finish_batch(samples=10)
    progress.finish_step()
    return bool(due(run))


@pytest.mark.parametrize(("step", "fires"), [(4, True), (5, False), (9, True), (10, False)])
def test_after_a_resume_it_fires_where_the_whole_run_would_have(step: int, fires: bool) -> None:
    progress = Progress(max_steps=20)
    progress.begin(Counters(step=step, batch=step, samples=10 * step), batches_per_epoch=None)
    assert passed(Schedule.parse("5 steps"), progress) is fires


@pytest.mark.parametrize(
    ("filter", "limits", "reason"),
    [
        (Every("1000 steps"), {"max_steps": 300}, "the run ends after 300 steps"),
        (Every("4 epochs"), {"max_epochs": 3, "batches_per_epoch": 5}, "the run ends after 3 epochs"),
        (At("16 batches"), {"max_epochs": 3, "batches_per_epoch": 5}, "the run ends after 15 batches"),
        (Schedule.parse("2 epochs"), {"max_epochs": 1}, "the run ends after 1 epoch"),
        (Schedule.parse("11 steps"), {"max_epochs": 2, "batches_per_epoch": 5}, "the run ends after 10 steps"),
        (Schedule.parse("10 steps"), {"max_epochs": 2, "batches_per_epoch": 5}, None),
        (Schedule.parse("11 steps"), {"max_epochs": 2}, None),  # of unknown length
        (Schedule.parse("99 h"), {"max_steps": 1}, None),
        (Schedule.parse("99999 samples"), {"max_steps": 1}, None),
        (When(lambda run: False), {"max_steps": 1}, None),
    ],
)
def test_what_can_never_fire_says_why(filter: Any, limits: dict[str, int], reason: str | None) -> None:
    assert filter.never(Progress(**limits), 1) == reason


def test_accumulation_makes_fewer_steps() -> None:
    limits = Progress(max_epochs=2, batches_per_epoch=5)
    assert Every("7 steps").never(limits, 2) == "the run ends after 6 steps"
    assert Every("6 steps").never(limits, 2) is None


def test_parts_of_epochs_are_counted_by_the_length_of_each_where_other_ranks_began_one() -> None:
    progress = Progress(max_epochs=4, batches_per_epoch=4)
    progress.begin(Counters(epoch=0, step=3, batch=3, batch_in_epoch=3), 4)
    progress.take_over(20)
    due = Schedule.parse("1.5 epoch").timer().due
    run: Any = SimpleNamespace(progress=progress)
    fired = []
    for _ in range(4):
        for _ in range(progress.batch_in_epoch, progress.batches_per_epoch or 0):
            progress.finish_batch(1)
            progress.finish_step()
            if due(run):
                fired.append((progress.epoch, progress.batch_in_epoch))
        progress.finish_epoch()
    assert fired == [(1, 2), (2, 4)], "after 1.5 epochs, and after 3"
