"""The calendar: it names the calls that a run then makes. tests/hooks/test_random_schedules.py compares both."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cadenza import At, Callback, Every, First, Run, Schedule, When, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.errors import CheckpointMismatchError, ScheduleError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Moment
from cadenza.hooks.subscription import periodic
from cadenza.testing import tiny_loader, tiny_trainer
from tests.engine.parts import Unsized

Seen = tuple[str, int, int, int]  # the name of the callback, and epochs, steps and batches that are complete


class Notes(Callback):
    """Notes the counters each time that a moment fires, or where ``every=`` of a callback places it."""

    def __init__(self, name: str, moment: Moment | None, seen: list[Seen]) -> None:
        self.name, self.moment, self.seen = name, moment, seen

    def listeners(self) -> list[Listener]:
        return [periodic(1, self.note) if self.moment is None else Listener(self.moment, self.note, Every(1))]

    def note(self, run: Run, *_: Any) -> None:
        assert self.name is not None
        at = run.progress
        self.seen.append((self.name, at.epoch, at.step, at.batch))


def calls(trainer: Any, **arguments: Any) -> list[Seen]:
    """Return the calls of the trainer's calendar. All of them must be known."""
    calendar = trainer.calendar(**arguments)
    assert not [one for one in calendar.unknown if one[0].startswith("note")]
    return [(row.callback, row.epoch, row.step, row.batch) for row in calendar.rows if row.callback.startswith("note")]


def test_a_schedule_at_the_end_of_steps_and_of_epochs_is_due_once_in_a_step() -> None:
    seen = list[Seen]()

    class Noting(Notes):
        def listeners(self) -> list[Listener]:
            return [periodic(~(Every("3 epochs") | First("1 step")), self.note)]

    trainer = tiny_trainer(batches=2, epochs=2, callbacks=[Noting("note", None, seen)])
    assert calls(trainer) == [("note", 0, 2, 2), ("note", 1, 3, 3), ("note", 1, 4, 4)]
    trainer.fit()
    assert seen == calls(trainer)


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
        before, after = ([Notes(f"note {name} {index}", moment, seen) for index, moment in enumerate(moments)] for name in "ab")
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


def test_it_can_be_a_frame_and_shows_in_a_notebook_what_print_shows() -> None:
    calendar = tiny_trainer(epochs=2, callbacks=[LogTraining("2 steps"), EarlyStopping("eval/loss", "min")][:1]).calendar()
    frame = calendar.to_frame()
    assert list(frame.columns) == ["step", "epoch", "batch", "moment", "callback", "schedule"]
    assert list(frame["step"]) == [2, 4, 6, 8, 10]
    assert "5 times: steps 2, 4, 6, 8, 10" in calendar._repr_html_()
