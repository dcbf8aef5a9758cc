"""The calendar: it names the calls that a run then makes. Random schedules at random moments show it, also after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza import At, Between, Callback, Every, First, Last, Run, Schedule, When, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.errors import ScheduleError
from cadenza.hooks.counting import counting_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Moment, moments_of
from cadenza.hooks.subscription import periodic
from cadenza.testing import launch, tiny_loader, tiny_trainer
from tests.distributed.parts import loader as sharded_loader
from tests.distributed.parts import trainer as sharded_trainer

COUNTED = [
    moment
    for moment in moments_of(Callback).values()
    if counting_of(moment).unit != "time" and not counting_of(moment).main_only
]
UNITS = ("step", "batch", "epoch", "part of an epoch", "sample", "%", "")
SEEDS = range(20)
EACH = 10  # schedules in one run

Seen = tuple[str, int, int, int]  # the name of the callback, and epochs, steps and batches that are complete


class Notes(Callback):
    """Notes the counters each time that its schedule is due: at a moment, or where ``every=`` of a callback places it."""

    def __init__(self, name: str, moment: Moment | None, schedule: Schedule, seen: list[Seen]) -> None:
        self.name, self.moment, self.schedule, self.seen = name, moment, schedule, seen

    def listeners(self) -> list[Listener]:
        if self.moment is None:
            return [periodic(self.schedule, self.note)]
        return [Listener(self.moment, self.note, self.schedule)]

    def note(self, run: Run, *_: Any) -> None:
        assert self.name is not None
        at = run.progress
        self.seen.append((self.name, at.epoch, at.step, at.batch))

    def __repr__(self) -> str:
        return f"{self.moment.__name__ if self.moment else 'every='}: {self.schedule!r}"


def length_of(draw: random.Random, units: tuple[str, ...], *, zero: bool = False) -> str | int:
    unit = draw.choice(units)
    number = draw.choice((0,) if zero and draw.random() < 0.2 else (1, 2, 3, 4, 5, 7, 10, 12))
    match unit:
        case "":
            return max(1, number)
        case "part of an epoch":
            return f"{draw.choice(('0.2', '0.25', '0.5', '0.75', '1.5', '2.25'))} epoch"
        case "epoch":
            return f"{min(number, 3)} epochs"
        case "%":
            return f"{draw.choice((5, 10, 20, 25, 33, 50, 75, 100))}%"
        case _:
            return f"{number} {unit}{'es' if unit == 'batch' else 's'}"


def drawn(draw: random.Random, units: tuple[str, ...] = UNITS, depth: int = 2) -> Schedule:
    """Return a random schedule."""
    if depth and draw.random() < 0.6:
        first = drawn(draw, units, depth - 1)
        match draw.choice("|&~"):
            case "|":
                return first | drawn(draw, units, depth - 1)
            case "&":
                return first & drawn(draw, units, depth - 1)
            case _:
                return ~first
    match draw.choice(("every", "every", "at", "first", "last", "between")):
        case "every":
            return Every(length_of(draw, units))
        case "at":
            return At(length_of(draw, units))
        case "first":
            return First(length_of(draw, units))
        case "last":
            return Last(length_of(draw, tuple(unit for unit in units if unit not in ("sample", ""))))
        case _:
            unit = (draw.choice(units),)
            try:
                return Between(length_of(draw, unit, zero=True), length_of(draw, unit if "" in unit else without_bare(units)))
            except ScheduleError:  # it is empty
                return Every("3 steps")


def without_bare(units: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(unit for unit in units if unit)


def notes(draw: random.Random, seen: list[Seen], units: tuple[str, ...] = UNITS, moments: Any = COUNTED) -> list[Notes]:
    """Return callbacks with random schedules at random moments."""
    made: list[Notes] = []
    for index in range(EACH):
        moment = draw.choice((None, *moments))
        made.append(Notes(f"note {index}", moment, drawn(draw, units), seen))
    return made


def run_of(draw: random.Random) -> dict[str, Any]:
    """Return random arguments of a small run."""
    limits: dict[str, Any] = draw.choice(({"epochs": 3}, {"steps": 13}, {"epochs": 2, "steps": 9}, {"epochs": 4, "steps": 11}))
    accumulate: Any = draw.choice((1, 1, 2, 3, {0: 1, "4 steps": 3, "70%": 2}))
    return {**limits, "batches": draw.choice((4, 5, 6, 7)), "accumulate": accumulate}


def calls(trainer: Any) -> list[Seen]:
    """Return the calls of the trainer's calendar, all of which must be known."""
    calendar = trainer.calendar()
    assert not [one for one in calendar.unknown if one[0].startswith("note")]
    return [(row.callback, row.epoch, row.step, row.batch) for row in calendar.rows if row.callback.startswith("note")]


def of_each(rows: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    yield from ((f"note {index}", [row for row in rows if row[0] == f"note {index}"]) for index in range(EACH))


@pytest.mark.parametrize("seed", SEEDS)
def test_it_names_the_calls_of_random_schedules_in_their_order(seed: int) -> None:
    draw, seen = random.Random(seed), list[Seen]()
    callbacks = notes(draw, seen)
    trainer = tiny_trainer(callbacks=callbacks, **run_of(draw))
    expected = calls(trainer)
    trainer.fit()
    for one, (_, theirs), (_, named) in zip(callbacks, of_each(seen), of_each(expected), strict=True):
        assert theirs == named, one
    assert seen == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_resumes_at_a_random_step_makes_the_calls_that_are_left(seed: int, tmp_path: Path) -> None:
    draw, seen, marks = random.Random(1000 + seed), list[Seen](), list[tuple[str, int]]()
    # After a resume inside an epoch, on_epoch_start fires again; evaluations fire at any step.
    moments = [*(one for one in COUNTED if one is not Callback.on_epoch_start), Callback.on_eval_start, Callback.on_eval_end]
    state = draw.getstate()

    def made(seen: list[Seen]) -> list[Callback]:
        draw.setstate(state)
        return [*notes(draw, seen, moments=moments), Evaluate(tiny_loader(1), every="2 steps")]

    @on(Callback.on_save)
    def mark(run: Run, checkpoint: Any) -> None:
        marks.append((f"step-{run.progress.step:08d}", len(seen)))

    callbacks, arguments = made(seen), run_of(draw)
    saver = Checkpoint(every=At(f"{draw.randint(1, 3)} steps"), keep_last=2)
    tiny_trainer(callbacks=[*callbacks, saver, mark], directory=tmp_path, **arguments).fit()
    (name, before), *_ = marks
    again: list[Seen] = []
    tiny_trainer(callbacks=made(again), **arguments).fit(resume=tmp_path / "checkpoints" / name)
    for one, (_, theirs), (_, left) in zip(callbacks, of_each(again), of_each(seen[before:]), strict=False):
        assert theirs == left, f"{one} after {name} of {arguments}"


def test_on_several_ranks_each_makes_the_calls_that_it_names() -> None:
    def fitting() -> list[tuple[str, list[Seen], list[Seen]]]:
        wrong = []
        for seed in range(3):
            draw, seen = random.Random(2000 + seed), list[Seen]()
            callbacks = notes(draw, seen, tuple(unit for unit in UNITS if unit != "sample"))
            limits: dict[str, int] = draw.choice(({"max_epochs": 2}, {"max_steps": 7}))
            trainer = sharded_trainer(sharded_loader(48), callbacks=callbacks, accumulate=draw.choice((1, 2)), **limits)
            expected = calls(trainer)
            trainer.fit()
            named = zip(callbacks, of_each(seen), of_each(expected), strict=True)
            wrong += [(str(one), theirs, mine) for one, (_, theirs), (_, mine) in named if theirs != mine]
        return wrong

    assert launch(fitting, 3) == [[], [], []]


# -- the rest of the calendar -------------------------------------------------------------------------


class Stream:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_loader(3))


def note(run: Run, *_: object) -> None: ...


def test_steps_are_known_without_the_length_of_the_loader() -> None:
    callbacks = [on(Callback.on_step_end, every="30%")(note), on(Callback.on_epoch_end, every=2)(note)]
    calendar = tiny_trainer(steps=10, loader=Stream(), callbacks=callbacks).calendar()
    assert [(row.step, row.epoch) for row in calendar.rows] == [(3, None), (6, None), (9, None)]
    assert calendar.unknown == [("note#2 (every 2 epochs)", "on_epoch_end", "the loader does not say how many batches it has")]


def test_epochs_are_known_without_the_length_of_the_loader() -> None:
    calendar = tiny_trainer(epochs=4, loader=Stream(), callbacks=[on(Callback.on_epoch_end, every=2)(note)]).calendar()
    assert [(row.step, row.epoch) for row in calendar.rows] == [(None, 2), (None, 4)]
    assert "calendar of 4 epochs\non_epoch_end  note  every 2 epochs  2 times: epochs 2, 4" in str(calendar)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (Every("5 min") | At("3 steps"), "time decides"),
        (Every("2 steps") & When(bool), "a function decides"),
        (Every("100 tokens"), "it depends on the tokens of each batch"),
    ],
)
def test_calls_that_depend_on_the_run_are_not_known_beforehand(schedule: Schedule, why: str) -> None:
    calendar = tiny_trainer(callbacks=[on(Callback.on_step_end, every=schedule)(note)]).calendar()
    assert calendar.unknown == [(f"note ({schedule})", "on_step_end", why)]
    assert f"not known beforehand: note ({schedule}), on_step_end: {why}" in str(calendar)


def test_a_part_of_the_run_can_be_listed() -> None:
    trainer = tiny_trainer(epochs=1000, callbacks=[LogTraining("2 steps"), on(Callback.on_epoch_end, every=1)(note)])
    assert [row.step for row in trainer.calendar("2 epochs").rows] == [2, 4, 5, 6, 8, 10, 10]
    assert [row.step for row in trainer.calendar(4).rows] == [2, 4]
    assert [row.step for row in trainer.calendar("0.1%").rows] == [2, 4, 5]


@pytest.mark.parametrize("until", ["1 h", "100 samples", "0.5 epoch", "many"])
def test_a_part_that_is_no_length_of_the_run_is_an_error(until: str) -> None:
    with pytest.raises(ScheduleError):
        tiny_trainer().calendar(until)


def test_a_run_without_a_known_end_needs_the_part() -> None:
    trainer = tiny_trainer(callbacks=[LogTraining("2 steps")])
    trainer.max_epochs, trainer.max_tokens = None, 100
    with pytest.raises(ScheduleError, match="the end of this run is not known: give the length"):
        trainer.calendar()
    assert [row.step for row in trainer.calendar("5 steps").rows] == [2, 4]


def test_it_can_be_a_frame_and_a_picture() -> None:
    calendar = tiny_trainer(epochs=2, callbacks=[LogTraining("2 steps"), EarlyStopping("eval/loss", "min")][:1]).calendar()
    frame = calendar.to_frame()
    assert list(frame.columns) == ["step", "epoch", "batch", "moment", "callback", "schedule"]
    assert list(frame["step"]) == [2, 4, 6, 8, 10]
    assert calendar._repr_html_().count("<svg") == 1
