"""Schedules in words: what can be read, when they fire, when they never can, and when their listeners are suspended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import At, Between, Callback, Counters, Every, First, Last, Progress, Schedule, When, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import ScheduleError
from cadenza.hooks.counters import COUNTERS, STEP_END, Counter, Reading
from cadenza.hooks.listener import Listener, Trigger
from cadenza.hooks.schedule import FORMS, Interval
from cadenza.hooks.subscription import periodic
from cadenza.run import Run
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.engine.parts import Unsized


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
        ("2 d", "every 48 h"),
        ("10%", "every 10%"),
        ("2.5 %", "every 2.5%"),
        ("1e6 tokens", "every 1000000 tokens"),
        ("1.5e3 steps", "every 1500 steps"),
        (Every("3 epochs") & ~First("2 steps"), "every 3 epochs and not in the first 2 steps"),
        (First(7), "in the first 7 steps"),
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
        ("0.5 tokens", "tokens come in whole numbers"),
        ("1k steps", "unknown unit 'k'|expected a number and a unit"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_shows_the_forms(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem) as caught:
        Schedule.parse(text)
    assert FORMS in str(caught.value)


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
        ("0.000001 s", [*range(1, 11)]),
        # windows, and schedules that are composed
        (At("3 steps"), [3]),
        (At("1 epoch"), [5]),
        (At("25%"), [3]),
        (Every("25%"), [3, 5, 8, 10]),
        (First("2 steps"), [1, 2]),
        (First("1 epoch"), [1, 2, 3, 4, 5]),
        (First("0.5 epoch"), [1, 2]),
        (First("5 samples"), [1, 2]),
        (Last("1 epoch"), [6, 7, 8, 9, 10]),
        (Last("0.4 epoch"), [9, 10]),
        (Last("3 steps"), [8, 9, 10]),
        (Last("25%"), [8, 9, 10]),
        (Between("2 steps", "4 steps"), [3, 4]),
        (Between(0, "20%"), [1, 2]),
        (Between("1 epoch", "7 steps"), [6, 7]),
        (~Between("2 steps", "9 steps"), [1, 2, 10]),
        (Every("2 steps") & Between("3 steps", "1.6 epochs"), [4, 6, 8]),
        (Every("2 steps") & Every("3 steps"), [6]),
        (Every("4 steps") | Every("3 steps"), [3, 4, 6, 8, 9]),
        (Every("2 steps") & ~Every("4 steps"), [2, 6, 10]),
        (~(Every("2 steps") | First("4 steps")), [5, 7, 9]),
        (~~At("3 steps"), [3]),
        (Every("1 epoch") | At("3 steps"), [3, 5, 10]),
        (Every("1 epoch") | Every("5 steps"), [5, 10]),  # once, though both are due
        (Every("1 epoch") & Last("1 epoch"), [10]),
        (Every("2 steps") & When(lambda run: run.progress.step > 5), [6, 8, 10]),
        (First("1 h") & At("2 steps"), [2]),
        (Last("2 steps") | Every("1 h"), [9, 10]),
    ],
)
def test_a_schedule_fires_on_crossing_and_a_composed_one_where_its_parts_say(every: Any, expected: list[int]) -> None:
    assert steps_of(every) == expected


def test_a_counter_of_ones_own_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flops = Counter(lambda at: 600 * at.tokens, {"flop": 1, "Kflop": 1000}, exchanged=True)
    monkeypatch.setitem(COUNTERS, "flop", flops)
    steps = list[int]()
    note = on(Callback.on_step_end, every="10 Kflop")(lambda run: steps.append(run.progress.step))
    arguments: dict[str, Any] = {"epochs": 2, "tokens": lambda batch: 4, "directory": tmp_path}
    trainer = tiny_trainer(callbacks=[note, Checkpoint(At("3 steps"), keep_last=9)], **arguments)
    assert trainer.calendar().unknown[0][2] == "it depends on the flops of each batch"
    trainer.fit()
    assert steps == [5, 9], "2,400 a step"
    trainer.fit(resume=tmp_path / "checkpoints" / "step-00000003")
    assert steps[2:] == [5, 9]
    with pytest.raises(ScheduleError, match=r"'0\.5 flop' is no schedule: flop come in whole numbers"):
        Schedule.parse("0.5 flop")


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
        *[
            (schedule, {"max_epochs": 2, "batches_per_epoch": 5}, reason)
            for schedule, reason in (
                (At("11 steps") | Every("3 epochs"), "the run ends after 10 steps"),
                (At("11 steps") | Every("3 steps"), None),
                (Every("2 steps") & Between("10 steps", "20 steps"), "the run ends after 10 steps"),
                (Every("2 steps") & Between("9 steps", "20 steps"), None),
                (~At("11 steps"), None),
            )
        ],
    ],
)
def test_what_can_never_fire_says_why(filter: Any, limits: dict[str, Any], reason: str | None) -> None:
    assert filter.never(Progress(**limits), 1) == reason


def test_parts_of_epochs_are_counted_by_the_length_of_each_where_other_ranks_began_one() -> None:
    progress = Progress(max_epochs=4, batches_per_epoch=4)
    progress.begin(Counters(epoch=0, step=3, batch=3, batch_in_epoch=3), 4)
    progress.take_over(20)
    due = Trigger(Schedule.parse("1.5 epoch"), ["on_step_end"], STEP_END).due
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


# -- windows, and schedules that are composed ---------------------------------------------------------


def test_a_function_is_asked_only_where_the_rest_of_a_schedule_is_due() -> None:
    asked: list[int] = []

    def ask(run: Any) -> bool:
        asked.append(run.progress.step)
        return True

    assert steps_of(Every("4 steps") & When(ask)) == asked == [4, 8]
    assert steps_of("3 batches", accumulate=2, epochs=1, batches=6) == [2, 3], "batches are asked about at the end of steps"


def test_functions_decide_together_also_if_one_is_inverted() -> None:
    even, fourth = When(lambda run: run.progress.step % 2 == 0), When(lambda run: run.progress.step == 4)
    assert steps_of(even & ~fourth) == [2, 6, 8, 10]
    assert steps_of(~(fourth | ~even) & Last("5 steps")) == [6, 8, 10]


def test_a_window_in_parts_of_an_epoch_ends_with_an_epoch_that_ends_early() -> None:
    steps = list[int]()
    first = on(Callback.on_step_end, every=First("0.8 epoch"))(lambda run: steps.append(run.progress.step))
    early = on(Callback.on_step_end, at=2)(lambda run: run.end_epoch("enough"))
    tiny_run(callbacks=[first, early], batches=10, epochs=2)
    assert steps == [1, 2]


def test_a_schedule_is_shown_as_it_is_written_and_only_schedules_can_be_composed() -> None:
    schedule = (Every("2 steps") | At("1 epoch")) & ~Between(1, "50%")
    assert repr(schedule) == "(Every('2 steps') | At('1 epoch')) & ~Between(1, '50%')"
    assert schedule == (Every("2 steps") | At("1 epoch")) & ~Between(1, "50%")
    assert hash(schedule) != hash(~schedule)
    others: list[Any] = ["500 steps", 500, None]
    for other in others:
        with pytest.raises(TypeError, match="expected a schedule on both sides of"):
            _ = Every("2 steps") | other


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Between("5 steps", "2 steps"), r"Between\('5 steps', '2 steps'\) is empty"),
        (lambda: First(0), "a number must be whole and at least 1"),
        (lambda: Schedule.parse("0 steps"), r"'0 steps' is no schedule: the number must be greater than 0"),
        (lambda: Every("120%"), "a run has 100%"),
        (lambda: Last("many"), "expected a number and a unit"),
    ],
)
def test_a_schedule_that_cannot_be_due_is_an_error_when_written(make: Any, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        make()


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (Every("10%"), "'every 10%' needs a run of known length"),
        (Every("3 steps") & Last("1 epoch"), "'in the last epoch' needs a run that knows its length in epochs"),
        (Last("10 samples"), "'in the last 10 samples' needs a run that knows its length in samples"),
        (Last("1 h"), "'in the last 1 h' needs a run that knows its length in seconds"),
        (First("0.5 epoch"), "'in the first 0.5 epoch' needs a loader that knows its length"),
    ],
)
def test_a_schedule_that_this_run_cannot_meet_is_an_error_before_the_first_step(schedule: Schedule, problem: str) -> None:
    with pytest.raises(ScheduleError, match=f"LogTraining: {problem}"):
        tiny_run(callbacks=[LogTraining(schedule)], loader=Unsized(tiny_loader()), epochs=2, steps=9)


@pytest.mark.parametrize("moment", [Callback.on_eval_end, Callback.on_save, Callback.on_fit_end])
def test_every_moment_takes_a_length_in_any_unit(moment: Any) -> None:
    steps: list[int] = []
    look = on(moment, every="3 steps")(lambda run, *_: steps.append(run.progress.step))
    tiny_run(callbacks=[Evaluate(tiny_loader(1), every="2 steps"), look], steps=9)
    assert steps == {Callback.on_eval_end: [4, 6], Callback.on_save: [], Callback.on_fit_end: [9]}[moment]


class Noting(Callback):
    """Notes its name and the step on a schedule."""

    def __init__(self, name: str, every: Interval, seen: list[tuple[str, int]]) -> None:
        self.name, self.every, self.seen = name, every, seen

    def listeners(self) -> list[Listener]:
        return [periodic(self.every, self._note)]

    def _note(self, run: Run) -> None:
        assert self.name is not None
        self.seen.append((self.name, run.progress.step))


def test_a_resume_between_the_end_of_a_step_and_of_its_epoch_calls_each_schedule_that_is_left(tmp_path: Path) -> None:
    def callbacks(seen: list[tuple[str, int]]) -> list[Callback]:
        first, second = Every("5 steps") | Every("2 epochs"), Every("1 epoch") | At("100 steps")
        return [Noting("first", first, seen), Noting("second", second, seen), Evaluate(tiny_loader(1))]

    seen, again = list[tuple[str, int]](), list[tuple[str, int]]()
    saver = Checkpoint(At("5 steps"), keep_last=9)  # saves before the evaluation at the end of the epoch
    tiny_run(epochs=2, callbacks=[*callbacks(seen), saver], directory=tmp_path)
    assert seen == [("first", 5), ("second", 5), ("first", 10), ("second", 10)]
    tiny_trainer(epochs=2, callbacks=callbacks(again)).fit(resume=tmp_path / "checkpoints" / "step-00000005")
    assert again == seen[1:]


def noted(cadences: dict[str, str], **arguments: Any) -> list[tuple[str, int]]:
    """Return the names of callbacks with these schedules, and the steps at which they are called."""
    seen: list[tuple[str, int]] = []
    tiny_run(callbacks=[Noting(name, every, seen) for name, every in cadences.items()], **arguments)
    return seen


@pytest.mark.parametrize(
    "counts", [{"a": 10, "b": 15}, {"a": 30, "b": 1, "c": 10, "d": 12}, {"a": 500, "b": 600}, {"a": 11, "b": 11, "c": 2}]
)
def test_each_is_called_when_it_is_due_and_in_the_order_of_the_list(counts: dict[str, int]) -> None:
    expected = [(name, step) for step in range(1, 71) for name, count in counts.items() if step % count == 0]
    assert noted({name: f"{count} steps" for name, count in counts.items()}, steps=70) == expected


def test_schedules_of_all_counters_are_suspended_side_by_side() -> None:
    cadences = {"steps": "12 steps", "batches": "30 batches", "samples": "44 samples", "quarters": "0.5 epoch"}
    seen = noted(cadences, epochs=3, batches=20, accumulate=2)
    assert {name: [step for one, step in seen if one == name] for name in cadences} == {
        "steps": [12, 24],
        "batches": [15, 30],
        "samples": [11, 22],
        "quarters": [5, 10, 15, 20, 25, 30],
    }


@pytest.mark.parametrize("every", ["25 steps", "50 batches", "200 samples", "2.5 epochs", "25%", "100 min", Last("2 steps")])
def test_a_schedule_is_asked_in_few_of_the_steps_between_and_once_for_all(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, asked = Schedule.parse(every), list[int]()
    due = type(schedule).due

    def counted(self: Any, now: Reading, before: Reading) -> bool:
        if before is not now:  # else it says whether it may be due before its next point
            asked.append(int(now.counts["step"]))
        return due(self, now, before)

    monkeypatch.setattr(type(schedule), "due", counted)
    tiny_run(callbacks=[Noting(name, every, []) for name in "abc"], batches=20, epochs=10, accumulate=2)
    assert 1 <= len(asked) <= 25, "of 100 steps"
    assert len(set(asked)) == len(asked)


def test_one_that_is_disabled_while_others_are_suspended_is_not_called_any_more() -> None:
    seen: list[tuple[str, int]] = []

    class Failing(Noting):
        on_fault = "disable"

        def _note(self, run: Run) -> None:
            super()._note(run)
            raise RuntimeError("broken")

    callbacks = [Noting("a", "10 steps", seen), Failing("broken", "20 steps", seen), Noting("c", "20 steps", seen)]
    run = tiny_run(callbacks=callbacks, steps=60)
    assert [step for name, step in seen if name == "broken"] == [20]
    assert [step for name, step in seen if name == "c"] == [20, 40, 60]
    assert [fault.callback for fault in run.faults] == ["broken"]


def test_ranks_look_at_a_clock_of_minutes_about_once_a_second() -> None:
    progress = Progress(max_epochs=99, batches_per_epoch=11, accumulate=3)
    trigger = Trigger(Schedule.parse("10 min"), ["on_step_end"], STEP_END)
    run: Any = SimpleNamespace(progress=progress)

    def next_step_after(steps: int, seconds: float) -> float:
        for _ in range(steps):
            progress.finish_step()
        progress._began -= seconds
        return trigger.next_step(progress)

    assert next_step_after(1, 0.0) == 1, "its pace is not known"
    assert next_step_after(200, 2.0) == pytest.approx(201 + 100, abs=2), "a hundred steps a second"
    assert next_step_after(5000, 50.0) == pytest.approx(5201 + 100, abs=2)
    assert next_step_after(1, 600.0) <= progress.step, "the time is up"
    assert trigger.due(run)


def test_after_a_resume_a_schedule_that_joins_one_of_each_step_does_not_call_for_steps_before(tmp_path: Path) -> None:
    each, joined = list[int](), list[int]()
    every_step = on(Callback.on_step_end, every="1 step")(lambda run: each.append(run.progress.step))
    fifth = on(Callback.on_step_end, every="5 steps")(lambda run: joined.append(run.progress.step))
    for epochs, callbacks in ((1, [every_step]), (2, [every_step, fifth])):
        trainer = tiny_trainer(callbacks=[*callbacks, Checkpoint("1 epoch")], epochs=epochs, batches=6, directory=tmp_path)
        run = trainer.fit(resume="auto")
    assert (each, joined) == ([*range(1, 13)], [10])
    assert not [decision for decision in run.decisions if decision.what == "never fired"]
