"""Callbacks that come into a run in the background, and leave it: `Handle.attach` and `Handle.detach`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Handle, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining
from cadenza.errors import CallbackError, ScheduleError
from cadenza.sinks.sink import Sink
from cadenza.testing import tiny_loader


class Endless:
    """A loader of which no epoch ends."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from tiny_loader()


class Story(Callback):
    """Writes down its moments, with the step."""

    def __init__(self, then: str = "") -> None:
        self.told: list[tuple[str, int]] = []
        self.then = then  # the hook that raises an error

    def tell(self, hook: str, run: Run) -> None:
        self.told.append((hook, run.progress.step))
        if hook == self.then:
            raise ValueError(f"{hook} is broken")

    def on_setup(self, run: Run) -> None:
        self.tell("on_setup", run)

    def on_fit_start(self, run: Run) -> None:
        self.tell("on_fit_start", run)
        run.at_end(lambda: self.tell("at_end", run))

    def on_epoch_start(self, run: Run) -> None:
        self.tell("on_epoch_start", run)

    def on_step_end(self, run: Run) -> None:
        self.tell("on_step_end", run)

    def on_epoch_end(self, run: Run) -> None:
        self.tell("on_epoch_end", run)

    def on_fit_end(self, run: Run) -> None:
        self.tell("on_fit_end", run)


def decided(handle: Handle, *what: str) -> list[tuple[str, str]]:
    return [(one.what, one.who) for one in handle.run.decisions if one.what in what]


def test_an_attached_callback_begins_and_a_detached_one_ends(started: Any) -> None:
    handle, story = started(loader=Endless()), Story()
    handle.pause()
    at = handle.run.progress.step
    handle.attach(story)
    assert story.told == [("on_setup", at), ("on_fit_start", at), ("on_epoch_start", at)]
    handle.step_once()
    handle.detach(story)
    ends = ["on_epoch_end", "on_fit_end", "at_end"]
    assert story.told[3:] == [("on_step_end", at + 1), *((end, at + 1) for end in ends)]
    handle.step_once()
    assert len(story.told) == 7
    who = [("attached", "the script"), ("detached", "the script")]
    assert decided(handle, "attached", "detached") == who
    handle.attach(story)  # again


def test_attached_callbacks_keep_their_names_order_and_schedules(started: Any) -> None:
    called: list[tuple[str, int]] = []

    class Early(Callback):
        def on_step_end(self, run: Run) -> None:
            called.append(("early", run.progress.step))

    class Late(Callback):
        def on_step_end(self, run: Run) -> None:
            called.append(("late", run.progress.step))

    Early.before = (Late,)
    handle = started(callbacks=[Late()])
    handle.pause()
    while handle.run.progress.step % 10 != 5:
        handle.step_once()
    called.clear()
    tens = on(Callback.on_step_end, every=10)(lambda run: called.append(("tens", run.progress.step)))
    past = on(Callback.on_step_end, at=2)(lambda run: called.append(("past", run.progress.step)))
    for one in (Early(), Late(), tens, past):
        handle.attach(one)
    at = handle.run.progress.step
    handle.step_once()
    assert called == [("early", at + 1), ("late", at + 1), ("late", at + 1)]
    called.clear()
    for _ in range(4):
        handle.step_once()
    assert [one for one in called if one[0] in ("tens", "past")] == [("tens", at + 5)]
    names = [one.data["callback"] for one in handle.run.decisions if one.what == "attached"]
    assert names[:2] == ["Early", "Late#2"]


def test_callbacks_of_cadenza_work_from_their_attachment_on(tmp_path: Path, started: Any) -> None:
    class Rows(Sink):
        def open(self, info: Any) -> None:
            self.rows: list[int] = []
            self.ended = False

        def write(self, records: Any) -> None:
            self.rows += [one.step for one in records]

        def close(self, outcome: Any) -> None:
            self.ended = True

    first, second, evaluate = Rows(), Rows(), Evaluate(tiny_loader(), every="1 step")
    handle = started(directory=tmp_path, callbacks=[LogTraining("1 step"), first])
    handle.pause()
    handle.attach(second)
    handle.attach(evaluate)
    handle.attach(saves := Checkpoint("1 step"))
    handle.step_once()
    step = handle.run.progress.step
    assert handle.run.history["eval/loss"][-1][0] == step
    handle.detach(evaluate)
    handle.detach(second)
    assert (second.rows, second.ended, first.ended) == ([step], True, False)
    handle.attach(Evaluate(tiny_loader(), every="1 step"))  # its name is free again
    handle.step_once()
    with pytest.raises(CallbackError, match=r"writes the checkpoints of the run.*begin a new one without it"):
        handle.detach(saves)
    handle.stop("enough")
    handle.join(60)
    assert first.rows[-1] == step + 1
    assert (tmp_path / "checkpoints").is_dir()


@pytest.mark.parametrize("hook", ["on_setup", "on_fit_start", "on_epoch_start"])
def test_a_callback_that_cannot_begin_is_no_part_of_the_run(hook: str, started: Any) -> None:
    handle, story = started(loader=Endless()), Story(then=hook)
    handle.pause()
    with pytest.raises(ValueError, match=f"{hook} is broken"):
        handle.attach(story)
    told = [*story.told]
    handle.step_once()
    assert story.told == told
    assert handle.run.outcome is None
    assert decided(handle, "attached") == []


def test_wrong_callbacks_are_named(started: Any) -> None:
    handle, story = started(), Story()
    with pytest.raises(CallbackError, match="is the class Story; expected an instance"):
        handle.attach(Story)
    with pytest.raises(CallbackError, match=r"is not in this run\. Its callbacks are none"):
        handle.detach(story)
    handle.attach(story)
    with pytest.raises(CallbackError, match="Story is in the run already"):
        handle.attach(story)
    handle = started(loader=Endless())
    with pytest.raises(ScheduleError, match=r"LogTraining: .*length"):
        handle.attach(LogTraining("0.5 epoch"))


def test_two_schedules_for_one_optimizer_are_refused(started: Any) -> None:
    def constant(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    handle = started(callbacks=[LearningRate(constant)])
    with pytest.raises(CallbackError, match="the same optimizer"):
        handle.attach(LearningRate(constant))


def test_a_callback_of_another_system_is_refused_with_what_to_do(started: Any) -> None:
    transformers = pytest.importorskip("transformers")
    handle, foreign = started(), transformers.PrinterCallback()
    with pytest.raises(CallbackError, match=r"is a callback of another system.*Give it to Trainer\(callbacks=\[...\]\)"):
        handle.attach(foreign)
    with pytest.raises(CallbackError, match=r"is a callback of another system.*Stop the run with handle\.stop"):
        handle.detach(foreign)


def test_records_reach_an_attached_callback(started: Any) -> None:
    seen: list[int] = []
    handle = started(callbacks=[LogTraining("1 step")])
    handle.pause()
    handle.attach(on(Callback.on_log)(lambda run, record: seen.append(record.step)))
    handle.step_once()
    assert seen == [handle.run.progress.step]
