"""Listeners that are not due for some steps are suspended: they are called when due, in order, and not asked before."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza import Callback, on
from cadenza.callbacks import Warmup
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.schedule import Schedule
from cadenza.hooks.subscription import periodic
from cadenza.run import Run
from cadenza.status.progress import Counters, Progress
from cadenza.testing import tiny_run


class Noting(Callback):
    """Notes its name and the step on a schedule."""

    def __init__(self, name: str, every: str, seen: list[tuple[str, int]]) -> None:
        self.name, self.every, self.seen = name, every, seen

    def listeners(self) -> list[Listener]:
        return [periodic(self.every, self._note)]

    def _note(self, run: Run) -> None:
        assert self.name is not None
        self.seen.append((self.name, run.progress.step))


def expected(cadences: dict[str, int], steps: int) -> list[tuple[str, int]]:
    """Return what callbacks with these intervals note, from the rule alone."""
    return [(name, step) for step in range(1, steps + 1) for name, count in cadences.items() if step % count == 0]


@pytest.mark.parametrize(
    "cadences", [{"a": 10, "b": 15}, {"a": 30, "b": 1, "c": 10, "d": 12}, {"a": 500, "b": 600}, {"a": 11, "b": 11, "c": 2}]
)
def test_each_is_called_when_it_is_due_and_in_the_order_of_the_list(cadences: dict[str, int]) -> None:
    seen: list[tuple[str, int]] = []
    tiny_run(callbacks=[Noting(name, f"{count} steps", seen) for name, count in cadences.items()], steps=70)
    assert seen == expected(cadences, 70)


def test_schedules_of_all_counters_are_suspended_side_by_side() -> None:
    seen: list[tuple[str, int]] = []
    cadences = {"steps": "12 steps", "batches": "30 batches", "samples": "44 samples", "quarters": "0.5 epoch"}
    callbacks = [Noting(name, every, seen) for name, every in cadences.items()]
    tiny_run(callbacks=callbacks, epochs=3, batches=20, accumulate=2)
    assert [step for name, step in seen if name == "steps"] == [12, 24]
    assert [step for name, step in seen if name == "batches"] == [15, 30]
    assert [step for name, step in seen if name == "samples"] == [11, 22]
    assert [step for name, step in seen if name == "quarters"] == [5, 10, 15, 20, 25, 30]


def called(run: Run, moment: Any) -> list[str]:
    """Return the owners of the listeners that a moment calls now."""
    return [listener.owner for listener in hooks_of(run)._calls[moment].listeners]


def test_a_suspended_listener_is_not_in_the_list_that_its_moment_calls() -> None:
    seen: list[tuple[str, int]] = []
    lists: list[list[str]] = []
    look = on(Callback.on_epoch_end)(lambda run: lists.append(called(run, Callback.on_step_end)))
    callbacks = [Noting("far", "1000 steps", seen), Noting("near", "2 steps", seen), Noting("also far", "900 steps", seen)]
    tiny_run(callbacks=[*callbacks, look], epochs=2)
    assert lists == [["near"], ["near"]]


@pytest.mark.parametrize("every", ["25 steps", "50 batches", "2.5 epochs", "100 min"])
def test_a_listener_is_asked_in_few_of_the_steps_between(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    timer = Schedule.parse(every).timer()
    due = type(timer).due

    def counted(self: Any, run: Run) -> bool:
        asked.append(run.progress.step)
        return due(self, run)

    monkeypatch.setattr(type(timer), "due", counted)
    tiny_run(callbacks=[Noting("far", every, [])], batches=20, epochs=10, accumulate=2)
    assert 1 <= len(asked) <= 20, "of 100 steps"


def test_one_that_is_disabled_while_others_are_suspended_is_not_called_any_more() -> None:
    seen: list[tuple[str, int]] = []

    class Failing(Noting):
        on_fault = "disable"

        def _note(self, run: Run) -> None:
            super()._note(run)
            raise RuntimeError("broken")

    callbacks = [Noting("a", "10 steps", seen), Failing("broken", "20 steps", seen), Noting("c", "20 steps", seen)]
    run = tiny_run(callbacks=callbacks, steps=60)
    assert [name for name, _ in seen].count("broken") == 1
    assert [step for name, step in seen if name == "c"] == [20, 40, 60]
    assert [fault.callback for fault in run.faults] == ["broken"]


def test_a_warm_up_that_is_over_is_not_called_any_more() -> None:
    lists: list[list[str]] = []
    look = on(Callback.on_step_end)(lambda run: lists.append(called(run, Callback.on_before_optimizer_step)))
    tiny_run(callbacks=[Warmup("3 steps"), look], steps=6)
    assert lists == [["Warmup"], ["Warmup"], [], [], [], []]


def test_a_moment_with_suspended_listeners_alone_is_as_one_without_listeners() -> None:
    seen: list[tuple[str, int]] = []
    shown: list[bool] = []
    look = on(Callback.on_batch_end)(lambda run, batch, outputs: shown.append("on_step_end" in vars(hooks_of(run))))
    tiny_run(callbacks=[Noting("far", "20 steps", seen), Noting("farther", "60 steps", seen), look], steps=64)
    assert seen == [("far", 20), ("far", 40), ("far", 60), ("farther", 60)]
    assert shown[0], "it was not asked yet"
    assert sum(shown) < 10


def test_a_part_of_an_epoch_is_right_though_the_loader_is_shorter_than_it_says() -> None:
    class Short:
        def __len__(self) -> int:
            return 100

        def __iter__(self) -> Any:
            from cadenza.testing import tiny_loader

            return iter(list(tiny_loader(40)))

    steps: list[int] = []
    quarter = on(Callback.on_batch_end, every="0.25 epoch")(lambda run, *_: steps.append(run.progress.step + 1))
    tiny_run(callbacks=[quarter], loader=Short(), epochs=3, batches=None)
    assert steps == [25, 50, 60, 70, 80, 90, 100, 110, 120]


# -- the rule that a timer is asked in time -----------------------------------------------------------


class Counting:
    """What a timer reads of a run: steps of two batches, three in the last of each epoch of 11."""

    def __init__(self, start: Counters) -> None:
        self.progress = Progress(max_epochs=99, batches_per_epoch=11)
        self.progress.begin(start, 11)
        self.driver = self

    def any_rank(self, value: bool) -> bool:
        return value

    def step(self) -> None:
        left = 11 - self.progress.batch_in_epoch
        for _ in range(left if left <= 3 else 2):
            self.progress.finish_batch(7)
        self.progress.finish_step()


@pytest.mark.parametrize("every", ["12 steps", "25 batches", "100 samples", "1 epoch", "0.4 epoch", "1.7 epochs", "1 h"])
@pytest.mark.parametrize("start", [Counters(), Counters(1, 6, 13, 2, 91)])
def test_no_timer_is_due_before_the_step_that_it_names(every: str, start: Counters) -> None:
    run: Any = Counting(start)
    progress = run.progress
    schedule: Schedule = Schedule.parse(every)
    timer, asked_each_time = schedule.timer(), schedule.timer()
    until, fired, expected_steps = 0.0, [], []
    for _ in range(200):
        progress._began -= 30
        run.step()
        if asked_each_time.due(run):
            expected_steps.append(progress.step)
        if progress.step >= until:
            if timer.due(run):
                fired.append(progress.step)
            until = timer.next_step(progress, 3)
        if progress.batch_in_epoch == 11:
            progress.finish_epoch()
            until = 0.0
    assert fired == expected_steps
    assert len(fired) >= 1


def test_a_clock_of_minutes_is_looked_at_about_once_a_second() -> None:
    run: Any = Counting(Counters())
    progress, timer = run.progress, Schedule.parse("10 min").timer()

    def look_after(steps: int, seconds: float) -> float:
        for _ in range(steps):
            progress.finish_step()
        progress._began -= seconds
        return timer.next_step(progress, 3)

    assert look_after(1, 0.0) == 1, "its pace is not known"
    assert look_after(200, 2.0) == pytest.approx(201 + 100, abs=2), "a hundred steps a second"
    assert look_after(5000, 50.0) == pytest.approx(5201 + 100, abs=2)
    assert look_after(1, 600.0) <= progress.step, "the time is up"
    assert timer.due(run)
