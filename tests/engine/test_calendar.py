"""The calendar: it names the calls that a run then makes. Random schedules at random moments show it, also after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cadenza import At, Between, Callback, Every, First, Last, Run, Schedule, When, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.errors import CheckpointMismatchError, ScheduleError
from cadenza.hooks.counting import counting_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Moment, moments_of
from cadenza.hooks.subscription import periodic
from cadenza.testing import launch, tiny_loader, tiny_trainer
from tests.distributed.parts import loader as sharded_loader
from tests.distributed.parts import own_rank
from tests.distributed.parts import trainer as sharded_trainer
from tests.engine.parts import Unsized
from tests.long import seeds

COUNTINGS = [(moment, counting_of(moment)) for moment in moments_of(Callback).values()]
COUNTED = [moment for moment, counting in COUNTINGS if counting.unit != "time" and not counting.main_only]
UNITS = ("step", "batch", "epoch", "part of an epoch", "sample", "%", "")
SEEDS = seeds(usual=6, long=20)
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
            last = unit if "" in unit else tuple(filter(None, units))
            try:
                return Between(length_of(draw, unit, zero=True), length_of(draw, last))
            except ScheduleError:  # it is empty
                return Every("3 steps")


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


def calls(trainer: Any, **arguments: Any) -> list[Seen]:
    """Return the calls of the trainer's calendar. All of them must be known, but those at evaluations."""
    calendar = trainer.calendar(**arguments)
    assert not [one for one in calendar.unknown if one[0].startswith("note") and not one[1].startswith("on_eval")]
    return [(row.callback, row.epoch, row.step, row.batch) for row in calendar.rows if row.callback.startswith("note")]


def of_each(rows: list[Seen]) -> Iterator[list[Seen]]:
    yield from ([row for row in rows if row[0] == f"note {index}"] for index in range(EACH))


def differences(callbacks: list[Notes], *lists: list[Seen]) -> list[tuple[str, Any]]:
    """Return the callbacks of which the calls are not the same in all lists."""
    rows = zip(callbacks, *map(of_each, lists), strict=True)
    return [(str(one), calls) for one, *calls in rows if any(rest != calls[0] for rest in calls)]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_names_the_calls_of_random_schedules_in_their_order(seed: int) -> None:
    draw, seen = random.Random(seed), list[Seen]()
    callbacks = notes(draw, seen)
    trainer = tiny_trainer(callbacks=callbacks, **run_of(draw))
    expected = calls(trainer)
    trainer.fit()
    assert not differences(callbacks, seen, expected)
    assert seen == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_resumes_at_a_random_step_makes_the_calls_that_are_left(seed: int, tmp_path: Path) -> None:
    draw, seen, marks = random.Random(1000 + seed), list[Seen](), list[tuple[str, int]]()
    moments = [*COUNTED, Callback.on_eval_start, Callback.on_eval_end]
    state = draw.getstate()

    def made(seen: list[Seen]) -> list[Notes]:
        draw.setstate(state)
        return notes(draw, seen, moments=moments)

    evaluate = Evaluate(tiny_loader(1), every="2 steps")

    mark = on(Callback.on_save)(lambda run, _: marks.append((f"step-{run.progress.step:08d}", len(seen))))
    callbacks, arguments = made(seen), run_of(draw)
    saver = Checkpoint(every=At(f"{draw.randint(1, 3)} steps"), keep_last=2)
    tiny_trainer(callbacks=[*callbacks, evaluate, saver, mark], directory=tmp_path, **arguments).fit()
    (name, before), *_ = marks
    again, checkpoint = list[Seen](), tmp_path / "checkpoints" / name
    trainer = tiny_trainer(callbacks=[*made(again), evaluate], **arguments)
    named = calls(trainer, resume=checkpoint)
    trainer.fit(resume=checkpoint)
    of_all = zip(callbacks, of_each(again), of_each(seen[before:]), of_each(named), strict=True)
    for one, theirs, left, listed in of_all:
        where = f"{one} after {name} of {arguments}"
        assert one.moment is Callback.on_epoch_start or theirs == left, where  # it fires again inside an epoch
        assert one.moment in moments[-2:] or theirs == listed, where  # evaluations fire at any step


at_step_3 = on(Callback.on_step_end, at="3 steps")


@pytest.mark.parametrize(
    ("step", "arguments", "ask"),
    [
        pytest.param(3, {"accumulate": 2}, None, id="the loader was found empty"),
        pytest.param(5, {}, None, id="after the last batch"),
        pytest.param(3, {"steps": 3}, None, id="the limit inside an epoch"),
        pytest.param(3, {}, at_step_3(lambda run: run.stop("enough")), id="a stop that was asked for"),
        pytest.param(3, {}, at_step_3(lambda run: run.end_epoch("enough")), id="an end of the epoch"),
    ],
)
def test_a_continuation_begins_where_the_checkpoint_lies(
    step: int, arguments: dict[str, Any], ask: Callback | None, tmp_path: Path
) -> None:
    again, named = continued(step, arguments, ask, tmp_path)
    assert again == named
    assert again or step != 5


def continued(step: int, arguments: dict[str, Any], ask: Callback | None, directory: Path) -> tuple[list[Seen], list[Seen]]:
    """Save at a step, continue from there; return the calls of the rest, and those that the calendar names.

    Also for tests/alone/test_left_evaluations.py.
    """
    moments = [Callback.on_epoch_start, Callback.on_fetch_end, Callback.on_step_end, None, Callback.on_epoch_end]

    def trainer(seen: list[Seen], first: list[Any], last: list[Any], directory: Path | None = None) -> Any:
        before, after = (
            [Notes(f"note {name} {index}", moment, Every(1), seen) for index, moment in enumerate(moments)] for name in "ab"
        )
        callbacks = [*first, *before, Evaluate(tiny_loader(2), every="4 steps"), *after, *last]
        limits: dict[str, Any] = {} if "steps" in arguments else {"epochs": 3}
        return tiny_trainer(callbacks=callbacks, directory=directory, **limits, **arguments)

    with suppress(SystemExit):
        trainer([], [ask] if ask else [], [Checkpoint(every=At(f"{step} steps"), keep_last=9)], directory).fit()
    again, checkpoint = list[Seen](), directory / "checkpoints" / f"step-{step:08d}"
    rest = trainer(again, [], [])
    named = calls(rest, resume=checkpoint)
    rest.fit(resume=checkpoint)
    return again, named


def written(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return what a write to a file or folder changes; a read changes the time of access."""
    found = ((path, path.stat()) for path in folder.rglob("*"))
    return {path: (facts.st_ino, facts.st_size, facts.st_mtime_ns) for path, facts in found}


def test_the_calendar_of_a_continuation_writes_nothing_and_follows_the_limits_of_the_trainer(tmp_path: Path) -> None:
    directory, while_it_runs = tmp_path / "run", list[Any]()
    trainer = tiny_trainer(
        epochs=2, callbacks=[LogTraining("2 steps"), Checkpoint("3 steps", keep_last=9)], directory=directory
    )
    assert trainer.calendar(resume="auto").rows == trainer.calendar().rows
    assert not directory.exists()
    look = on(Callback.on_epoch_end, at="1 epoch")(lambda run: while_it_runs.append(trainer.calendar(resume="auto")))
    tiny_trainer(epochs=2, callbacks=[*trainer.callbacks, look], directory=directory).fit()
    assert while_it_runs[0].rows  # another run holds the directory
    before = written(directory)
    assert trainer.calendar(resume="auto").rows == []  # the run is over
    trainer.max_epochs = 3
    calendar = trainer.calendar(resume="auto")
    assert [row.step for row in calendar.rows] == [12, 12, 14, 15]
    assert calendar.headline == "calendar of 3 epochs, 15 steps, after 10 steps"
    rows = trainer.calendar("2 epochs", resume="step-6").rows
    assert [(row.callback, row.step) for row in rows] == [("LogTraining", 8), ("Checkpoint", 9), ("LogTraining", 10)]
    assert trainer.calendar(5, resume="step-6").rows == []
    assert written(directory) == before
    trainer.loader = tiny_loader(4)
    with pytest.raises(CheckpointMismatchError, match="its loader had 5 batches, and this one has 4 batches"):
        trainer.calendar(resume="auto")


def run_on_ranks(seed: int, seen: list[Seen], directory: Path | None = None) -> tuple[list[Notes], Any]:
    """Return random schedules, and the trainer of a small run with them; with a directory, it saves at a random step."""
    draw = random.Random(3000 + seed)
    callbacks = notes(draw, seen, tuple(unit for unit in UNITS if unit != "sample"))
    limits: dict[str, int] = draw.choice(({"max_epochs": 3}, {"max_steps": 9}, {"max_epochs": 2, "max_steps": 5}))
    saver = Checkpoint(every=At(f"{draw.randint(1, 4)} steps"))
    data, accumulate = sharded_loader(draw.choice((40, 44, 48, 52))), draw.choice((1, 2))
    saves = {"callbacks": [*callbacks, saver], "directory": directory} if directory else {"callbacks": callbacks}
    return callbacks, sharded_trainer(data, accumulate=accumulate, **saves, **limits)


def test_on_several_ranks_each_makes_the_calls_that_it_names_also_if_others_began_the_run(tmp_path: Path) -> None:
    def beginning() -> list[Any]:
        wrong: list[Any] = []
        for seed in SEEDS:
            seen = list[Seen]()
            callbacks, trainer = run_on_ranks(seed, seen, tmp_path / str(seed))
            expected = calls(trainer)
            trainer.fit()
            wrong += differences(callbacks, seen, expected)
        return wrong

    def continuing() -> list[Any]:
        wrong: list[Any] = []
        for seed in SEEDS:
            seen = list[Seen]()
            callbacks, trainer = run_on_ranks(seed, seen)
            checkpoint = min((tmp_path / str(seed) / "checkpoints").glob("step-*"))
            alone = seed % 3 == own_rank()  # the others do not call it: it does not communicate
            expected = calls(trainer, resume=checkpoint) if alone else []
            trainer.fit(resume=checkpoint)
            wrong += differences(callbacks, seen, expected) if alone else []
        return wrong

    assert launch(beginning, 2) == [[], []]
    assert launch(continuing, 3) == [[], [], []]


# -- the rest of the calendar -------------------------------------------------------------------------


def note(run: Run, *_: object) -> None: ...


def test_steps_and_epochs_are_known_without_the_length_of_the_loader() -> None:
    callbacks = [on(Callback.on_step_end, every="30%")(note), on(Callback.on_epoch_end, every=2)(note)]
    calendar = tiny_trainer(steps=10, loader=Unsized(tiny_loader(3)), callbacks=callbacks).calendar()
    assert [(row.step, row.epoch) for row in calendar.rows] == [(3, None), (6, None), (9, None)]
    assert calendar.unknown == [("note#2 (every 2 epochs)", "on_epoch_end", "the loader does not say how many batches it has")]
    calendar = tiny_trainer(epochs=4, loader=Unsized(tiny_loader(3)), callbacks=callbacks[1:]).calendar()
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


def test_steps_of_a_number_of_tokens_are_not_known_beforehand_and_those_of_a_number_of_samples_are() -> None:
    calendar = tiny_trainer(batches=6, accumulate={0: 1, "8 tokens": 2}, callbacks=[LogTraining("2 steps")]).calendar()
    assert calendar.unknown == [("LogTraining (every 2 steps)", "on_step_end", "it depends on the tokens of each batch")]
    calendar = tiny_trainer(batches=6, accumulate={0: 1, "4 samples": 2}, callbacks=[LogTraining("2 steps")]).calendar()
    assert [(row.step, row.batch) for row in calendar.rows] == [(2, 2), (4, 6)]


def test_a_part_of_the_run_can_be_listed_and_a_run_without_a_known_end_needs_it() -> None:
    trainer = tiny_trainer(epochs=1000, callbacks=[LogTraining("2 steps"), on(Callback.on_epoch_end, every=1)(note)])
    assert [row.step for row in trainer.calendar("2 epochs").rows] == [2, 4, 5, 6, 8, 10, 10]
    assert [row.step for row in trainer.calendar(4).rows] == [2, 4]
    assert [row.step for row in trainer.calendar("0.1%").rows] == [2, 4, 5]
    trainer = tiny_trainer(callbacks=[LogTraining("2 steps")])
    for until in ("1 h", "100 samples", "0.5 epoch", "many"):
        with pytest.raises(ScheduleError):
            trainer.calendar(until)
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
