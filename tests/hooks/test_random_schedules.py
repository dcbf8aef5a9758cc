"""Random schedules at random moments, also after a resume and on multiple ranks, against a model and against the calendar."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza import At, Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import moments_of
from cadenza.hooks.subscription import periodic
from cadenza.testing import tiny_loader, tiny_trainer
from tests.distributed.parts import loader as sharded_loader
from tests.distributed.parts import own_rank
from tests.distributed.parts import trainer as sharded_trainer
from tests.distributed.standing import on_ranks, standing_ranks
from tests.hooks.schedule_model import COUNTED, EVERY, Course, Firing, Model, Spec, drawn, has_function, units, written
from tests.long import seeds

__all__ = ["standing_ranks"]

UNITS = ("step", "batch", "epoch", "part of an epoch", "sample", "token", "%", "")
EACH = 10  # schedules in one run
SEEDS = seeds(usual=8, long=120)
OF_RANKS = seeds(usual=3, long=40)  # for two ranks, and for three: with those of one process, 2,000 schedules

Seen = tuple[str, int, int, int]  # the name of the callback, and epochs, steps and batches that are complete


class Notes(Callback):
    """Notes the counters each time that its schedule is due: at a moment, or where ``every=`` of a callback places it."""

    def __init__(self, name: str, moment: str, spec: Spec, seen: list[Seen]) -> None:
        self.name, self.moment, self.spec, self.seen = name, moment, spec, seen

    def listeners(self) -> list[Listener]:
        if self.moment == EVERY:
            return [periodic(written(self.spec), self.note)]
        return [Listener(moments_of(Callback)[self.moment], self.note, written(self.spec))]

    def note(self, run: Run, *_: Any) -> None:
        assert self.name is not None
        at = run.progress
        self.seen.append((self.name, at.epoch, at.step, at.batch))

    def __repr__(self) -> str:
        return f"{self.moment} {self.spec}"


def notes(draw: random.Random, seen: list[Seen], ranks: int) -> list[Notes]:
    """Return callbacks with random schedules at random moments."""
    moments = [draw.choice((EVERY, *COUNTED)) for _ in range(EACH)]
    return [Notes(f"note {index}", one, drawn(draw, UNITS, ranks=ranks), seen) for index, one in enumerate(moments)]


def course_of(draw: random.Random, ranks: int) -> Course:
    """Return a random small run."""
    limits: dict[str, Any] = draw.choice(({"epochs": 3}, {"steps": 13}, {"epochs": 2, "steps": 9}, {"epochs": 4, "steps": 11}))
    accumulate: Any = draw.choice((1, 1, 2, 3, {0: 1, "4 steps": 3, "70%": 2}))
    batches = draw.choice((4, 5, 6, 7))
    return Course(batches, **limits, accumulate=accumulate, samples=2 * ranks, tokens=6 * ranks)


def trainer_of(course: Course, callbacks: list[Any], ranks: int, directory: Path | None) -> Trainer:
    limits: dict[str, Any] = {"accumulate": course.accumulate, "directory": directory}
    limits["tokens"] = lambda batch: 3 * len(batch[0])
    evaluate = Evaluate(tiny_loader(1), every=f"{course.evaluates} steps")
    if ranks == 1:
        limits |= {"epochs": course.epochs, "steps": course.steps, "batches": course.batches}
        return tiny_trainer(callbacks=[*callbacks, evaluate], **limits)
    limits |= {"max_epochs": course.epochs, "max_steps": course.steps}
    data = sharded_loader(course.batches * course.samples, batch_size=2)
    valid = Evaluate(sharded_loader(6, batch_size=2), every=f"{course.evaluates} steps")
    return sharded_trainer(data, callbacks=[*callbacks, valid], **limits)


def of(name: str | None, rows: list[Seen]) -> list[Seen]:
    return [row for row in rows if row[0] == name]


def named(trainer: Trainer, **arguments: Any) -> list[Seen]:
    """Return the calls that the calendar of a trainer names."""
    return [(row.callback, row.epoch or 0, row.step or 0, row.batch or 0) for row in trainer.calendar(**arguments).rows]


def is_known(note: Notes, ranks: int) -> bool:
    """Return whether the calendar knows the calls of a note beforehand."""
    unknown = {"s", "token"} if ranks == 1 else {"s", "token", "sample"}
    return not has_function(note.spec) and not units(note.spec) & unknown and COUNTED.get(note.moment) != "time"


def of_model(
    notes: list[Notes], course: Course, before: list[Firing], firings: list[Firing], seen: list[Seen]
) -> Iterator[str]:
    """Yield the schedules that were not due as the model says."""
    for note in notes:
        model = Model(note.spec, note.moment, course)
        expected = [(note.name, one.epoch, one.step, one.batch) for one in model.calls(before, firings)]
        if of(note.name, seen) != expected:
            yield f"{note!r} in {course}, after {len(before)} firings: {of(note.name, seen)}, and the model says {expected}"


def of_calendar(notes: list[Notes], seen: list[Seen], known: list[Seen], ranks: int) -> Iterator[str]:
    """Yield the schedules that were not due as the calendar says, and whether another order differs."""
    listed = [note for note in notes if is_known(note, ranks)]
    for note in listed:
        if of(note.name, seen) != of(note.name, known):
            yield f"{note!r}: {of(note.name, seen)}, and the calendar says {of(note.name, known)}"
    names = {note.name for note in listed}
    if [row for row in seen if row[0] in names] != [row for row in known if row[0] in names]:
        yield f"the order of {names}"


def beginning(seed: int, directory: Path, ranks: int = 1) -> list[str]:
    """Train with random schedules, save at a random step and continue there; return what differs."""
    draw, seen, again, epochs = random.Random(f"{seed} on {ranks}"), list[Seen](), list[Seen](), list[int]()
    course = course_of(draw, ranks)
    step = draw.randint(1, min(6, max(one.step for one in course.firings()) - 1))
    state = draw.getstate()
    callbacks = notes(draw, seen, ranks)
    mark = on(Callback.on_save)(lambda run, _: epochs.append(run.progress.epoch))
    trainer = trainer_of(course, [*callbacks, Checkpoint(every=At(f"{step} steps"), keep_last=9), mark], ranks, directory)
    known = named(trainer)
    trainer.fit()
    found = [*of_model(callbacks, course, [], [*course.firings()], seen), *of_calendar(callbacks, seen, known, ranks)]
    draw.setstate(state)
    callbacks, checkpoint = notes(draw, again, ranks), directory / "checkpoints" / f"step-{step:08d}"
    trainer = trainer_of(course, [*callbacks], ranks, None)
    known = named(trainer, resume=checkpoint)
    trainer.fit(resume=checkpoint)
    found += of_model(callbacks, course, *course.continuation(step, epochs[0]), again)
    return [*found, *of_calendar(callbacks, again, known, ranks)]


def continuing(seed: int, directory: Path) -> list[str]:
    """Continue on three ranks what two ranks began; return what differs from the calendar."""
    draw, seen = random.Random(f"{seed} on 2"), list[Seen]()
    course = course_of(draw, 2)
    draw.randint(1, min(6, max(one.step for one in course.firings()) - 1))
    callbacks = [*notes(draw, seen, 2)]
    trainer = trainer_of(course, [*callbacks], 2, None)
    checkpoint = min((directory / "checkpoints").glob("step-*"))
    alone = seed % 3 == own_rank()  # the others do not call it: it does not communicate
    known = named(trainer, resume=checkpoint) if alone else []
    trainer.fit(resume=checkpoint)
    return [*of_calendar(callbacks, seen, known, 3)] if alone else []


@pytest.mark.parametrize("seed", SEEDS)
def test_schedules_are_due_as_the_model_and_the_calendar_say_also_after_a_resume(seed: int, tmp_path: Path) -> None:
    found = beginning(seed, tmp_path)
    assert not found, "\n".join(found)


def test_on_several_ranks_each_is_due_as_the_model_and_the_calendar_say_also_if_others_began_the_run(tmp_path: Path) -> None:
    def on_two() -> list[str]:
        return [one for seed in OF_RANKS for one in beginning(seed, tmp_path / f"{seed} on 2", 2)]

    def on_three() -> list[str]:
        found = [one for seed in OF_RANKS for one in beginning(seed, tmp_path / f"{seed} on 3", 3)]
        return found + [one for seed in OF_RANKS for one in continuing(seed, tmp_path / f"{seed} on 2")]

    found = [one for of_rank in on_ranks(on_two, 2) + on_ranks(on_three, 3) for one in of_rank]
    assert not found, "\n".join(found)
