"""`Trainer.start`: a run in the background, which a notebook pauses, continues and changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Handle, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining
from cadenza.errors import CallbackError, ScheduleError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Moment
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.testing import launch, tiny_loader, tiny_trainer
from tests import forked
from tests.waiting import until


@pytest.fixture
def started() -> Iterator[Any]:
    """Start runs of many steps, and stop those that the test leaves."""
    handles: list[Handle] = []

    def start(trainer: Trainer | None = None, **arguments: Any) -> Handle:
        handles.append((trainer or tiny_trainer(**{"steps": 1_000_000, **arguments})).start())
        return handles[-1]

    yield start
    for handle in handles:
        if not handle.done:
            handle.stop("the test is over")
            handle.join(60)


def decided(handle: Handle, *what: str) -> list[tuple[str, str]]:
    return [(one.what, one.who) for one in handle.run.decisions if one.what in what]


def test_a_run_in_the_background_ends_as_fit_does() -> None:
    torch.manual_seed(1)
    before = tiny_trainer(epochs=2)
    expected = before.fit()
    torch.manual_seed(1)
    trainer = tiny_trainer(epochs=2)
    run = trainer.start().join()
    assert run is trainer.run
    assert (run.outcome, run.progress.now()) == (expected.outcome, expected.progress.now())
    assert all(map(torch.equal, trainer.model.parameters(), before.model.parameters()))


def test_it_takes_the_arguments_of_fit(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        return tiny_trainer(steps=steps, directory=tmp_path, callbacks=[Checkpoint("2 steps")])

    trainer(3).start().join()
    handle = trainer(6).start(resume="auto")
    assert [one.when.step for one in handle.join().decisions if one.what == "resumed"] == [3]
    over = trainer(6).start(resume="auto")
    assert over.join().progress.step == 6
    assert "the limit is reached" in repr(over)
    with pytest.raises(TypeError, match="resume"):
        trainer(6).start(resume=3)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("error", [ValueError("the batch is broken"), StopIteration("the batch is broken")])
def test_an_error_is_kept_for_join(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        gate.wait(60)
        raise error

    handle = tiny_trainer(callbacks=[fail]).start()
    assert handle.run.outcome is None
    gate.set()
    until(lambda: handle.done)
    for _ in range(2):
        with pytest.raises(type(error), match="the batch is broken"):
            handle.join()
    assert f"failed: {error!r}" in repr(handle)
    assert f"the run in the background failed: {error!r}" in caplog.text
    assert handle.run.outcome == Outcome("failed", repr(error))


def test_a_run_that_cannot_begin_raises_its_error_where_it_is_asked_for() -> None:
    trainer = tiny_trainer()
    trainer.callbacks.append(Checkpoint())  # it has no folder
    handle = trainer.start()
    for ask in (lambda: handle.run, handle.pause, handle.join):
        with pytest.raises(ValueError, match="Checkpoint needs a folder"):
            ask()
    assert "failed" in repr(handle)


def test_one_trainer_trains_one_run_at_a_time(started: Any) -> None:
    trainer = tiny_trainer(steps=1_000_000)
    handle = started(trainer)
    for again in (trainer.start, trainer.fit, trainer.steps):
        with pytest.raises(RuntimeError, match="trains in the background already"):
            again()
    handle.stop("enough")
    assert handle.join().outcome.kind == "stopped"
    handle.stop("again")  # nothing is left to stop
    with pytest.raises(RuntimeError, match="the run is over"):
        handle.pause()


def test_a_paused_run_stands_at_a_step_boundary_and_can_be_stopped_and_ends_whole(tmp_path: Path, started: Any) -> None:
    handle = started(directory=tmp_path, callbacks=[Checkpoint("1 epoch")])
    assert handle.run.outcome is None
    with pytest.raises(TimeoutError, match=r"goes on after 0.01 s: <Handle: training; "):
        handle.join(0.01)
    handle.pause("to look at the weights")
    step, weights = handle.run.progress.step, [one.clone() for one in handle.run.model.parameters()]
    training_s = handle.run.progress.training_s
    time.sleep(0.05)
    assert handle.run.progress.step == step
    assert all(map(torch.equal, handle.run.model.parameters(), weights))
    assert handle.run.progress.training_s == training_s  # time in a pause does not count as training
    assert handle.paused
    assert repr(handle).startswith("<Handle: paused; ")
    assert "paused" in handle._repr_html_()
    handle.pause()  # nothing more to do
    handle.resume()
    until(lambda: handle.run.progress.step > step)
    assert [(one.what, one.why, one.who) for one in handle.run.decisions if one.what in ("paused", "continued")] == [
        ("paused", "to look at the weights", "the script"),
        ("continued", "handle.resume() was called", "the script"),
    ]
    handle.pause()
    step = handle.run.progress.step
    handle.stop("enough")
    run = handle.join(60)
    assert (run.outcome.kind, run.outcome.reason, run.progress.step) == ("stopped", "enough", step)
    assert list((tmp_path / "checkpoints").glob(f"*{step}*"))


def test_step_once_does_one_step_also_over_the_end_of_an_epoch(started: Any) -> None:
    handle = started(batches=2)
    handle.step_once()  # of a run that goes on
    first = handle.run.progress.step
    for more in range(1, 6):
        assert handle.paused
        handle.step_once()
        assert handle.run.progress.step == first + more
    assert handle.run.progress.epoch >= 2


def test_a_hook_pauses_its_run(started: Any) -> None:
    known = threading.Event()

    @on(Callback.on_step_end, at=3)
    def halt(run: Run) -> None:
        known.wait(60)
        handle.pause("step 3")

    handle = started(callbacks=[halt])
    known.set()
    until(lambda: handle.paused)
    assert handle.run.progress.step == 3
    handle.resume()
    assert decided(handle, "paused", "continued") == [("paused", "halt"), ("continued", "the script")]


def test_the_last_step_can_be_the_one(started: Any) -> None:
    gate = threading.Event()
    wait = on(Callback.on_step_end, at=1)(lambda run: gate.wait(60))
    handle = started(steps=3, callbacks=[wait])
    threading.Timer(0.05, gate.set).start()
    while handle.run.progress.step < 3:
        handle.step_once()
    assert handle.paused
    with pytest.raises(RuntimeError, match="the run is over"):
        handle.step_once()
    assert handle.join(60).outcome.kind == "finished"


# -- callbacks that come and leave --------------------------------------------------------------------


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

    def listeners(self) -> list[Listener]:
        begin: list[Moment] = [Callback.on_setup, Callback.on_fit_start, Callback.on_epoch_start]
        moments = [*begin, Callback.on_step_end, Callback.on_epoch_end, Callback.on_fit_end]
        return [Listener(moment, partial(self.tell, moment.__name__)) for moment in moments]

    def tell(self, hook: str, run: Run) -> None:
        self.told.append((hook, run.progress.step))
        if hook == "on_fit_start":
            run.at_end(lambda: self.tell("at_end", run))
        if hook == self.then:
            raise ValueError(f"{hook} is broken")


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
    assert decided(handle, "attached", "detached") == [("attached", "the script"), ("detached", "the script")]
    handle.attach(story)  # again


def test_attached_callbacks_keep_their_names_order_and_schedules(started: Any) -> None:
    called: list[tuple[str, int]] = []

    class Late(Callback):
        def on_step_end(self, run: Run) -> None:
            called.append(("late", run.progress.step))

    class Early(Callback):
        before = (Late,)

        def on_step_end(self, run: Run) -> None:
            called.append(("early", run.progress.step))

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
    for _ in range(5):
        handle.step_once()
    assert called[:3] == [("early", at + 1), ("late", at + 1), ("late", at + 1)]
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
    records: list[int] = []
    handle.attach(on(Callback.on_log)(lambda run, record: records.append(record.step)))
    handle.step_once()
    step = handle.run.progress.step
    assert handle.run.history["eval/loss"][-1][0] == step
    assert set(records) == {step}
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


def test_wrong_callbacks_are_refused_with_what_to_do(started: Any) -> None:
    def constant(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    transformers = pytest.importorskip("transformers")
    handle, story, foreign = started(callbacks=[LearningRate(constant)]), Story(), transformers.PrinterCallback()
    with pytest.raises(CallbackError, match=r"is not in this run\. Its callbacks are LearningRate"):
        handle.detach(story)
    handle.attach(story)
    other_system = r"is a callback of another system.*Give it to Trainer\(callbacks=\[...\]\)"
    refused: list[tuple[Any, str]] = [
        (Story, "is the class Story; expected an instance"),
        (story, "Story is in the run already"),
        (LearningRate(constant), "the same optimizer"),
        (foreign, other_system),
    ]
    for callback, message in refused:
        with pytest.raises(CallbackError, match=message):
            handle.attach(callback)
    with pytest.raises(CallbackError, match=r"is a callback of another system.*Stop the run with handle\.stop"):
        handle.detach(foreign)
    handle = started(loader=Endless())
    with pytest.raises(CallbackError, match=r"is not in this run\. Its callbacks are none"):
        handle.detach(story)
    with pytest.raises(ScheduleError, match=r"LogTraining: .*length"):
        handle.attach(LogTraining("0.5 epoch"))


def steer_on_two() -> None:
    def steer() -> None:
        handle = tiny_trainer(steps=1_000_000, driver="ddp").start()
        with pytest.raises(RuntimeError, match="works in one process only"):
            handle.pause()
        handle.stop("enough")
        assert handle.join(60).outcome == Outcome("stopped", "enough")

    launch(steer, 2)


def test_on_several_ranks_a_run_is_stopped_but_not_paused(tmp_path: Path) -> None:
    process = forked.start(steer_on_two, output=tmp_path / "said.txt")  # `launch` forks: not from a process with threads
    assert process.ended() == 0, process.said()
