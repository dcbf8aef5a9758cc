"""An attached loop that ends where it wants to, and counts only what it has: no epochs, and batches if it says so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Loop, Run, attach
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining, Timer
from cadenza.commands.following import Following
from cadenza.commands.watch import lines
from cadenza.errors import DataError, ScheduleError
from cadenza.report import small, story_at
from cadenza.report.sections import card
from cadenza.sinks import Console, ProgressBar
from cadenza.status.decisions import Outcome
from cadenza.testing import tiny_trainer


def attached(**arguments: Any) -> Loop:
    model = nn.Linear(2, 1)
    return attach(model, torch.optim.SGD(model.parameters(), 0.1), **{"progress": False, **arguments})


def one_step(loop: Loop, *, batches: bool = False) -> None:
    model = loop.run.model
    with loop.step():
        if batches:
            with loop.batch(torch.ones(4, 2)) as batch:
                loop.backward(model(batch).square().mean())
        else:
            loop.backward(model(torch.ones(1, 2)).square().mean())
        loop.update()


def played(*, batches: bool = False, **arguments: Any) -> Loop:
    with attached(**arguments) as loop:
        while not loop.over():
            one_step(loop, batches=batches)
    return loop


# -- how it ends ------------------------------------------------------------------------------------


def test_without_a_limit_the_run_ends_when_the_loop_is_left(tmp_path: Path) -> None:
    reward = 0
    with attached(directory=tmp_path, callbacks=[Checkpoint("100 steps")]) as loop:
        while reward < 5 and not loop.over():
            one_step(loop)
            reward += 1
    assert loop.run.outcome is not None
    assert (loop.run.outcome.kind, loop.run.outcome.reason) == ("stopped", "the loop was left")
    assert loop.run.progress.step == 5
    assert [one.name for one in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]
    with attached(directory=tmp_path, callbacks=[Checkpoint("100 steps")], resume="auto") as again:
        assert again.over()


def test_a_request_to_stop_ends_a_loop_without_a_limit() -> None:
    with attached() as loop:
        while not loop.over():
            one_step(loop)
            if loop.run.progress.step == 3:
                loop.run.stop("enough")
    assert loop.run.outcome is not None
    assert (loop.run.outcome.kind, loop.run.outcome.reason) == ("stopped", "enough")
    assert loop.run.progress.step == 3


def test_a_schedule_in_percent_needs_a_limit() -> None:
    with pytest.raises(ScheduleError, match="max_steps="), attached(callbacks=[LogTraining("50%")]):
        pass


def test_epochs_are_no_limit() -> None:
    with pytest.raises(TypeError, match=r"takes no max_epochs=: the loop has no epochs\. Give max_steps="):
        attached(max_epochs=3)


def test_tokens_are_a_limit_for_batches_alone() -> None:
    run = played(batches=True, max_tokens=20, tokens=lambda batch: int(batch.numel())).run
    assert (run.progress.step, run.progress.tokens) == (3, 24)
    with pytest.raises(DataError, match=r"max_tokens=20 counts the tokens of batches, and this step has none"):
        played(max_tokens=20)


@pytest.mark.parametrize(
    "callback",
    [Checkpoint, lambda: Evaluate([torch.ones(1, 2)], compute=lambda model, batch: {}), lambda: LogTraining("1 epoch")],
)
def test_a_schedule_in_epochs_is_named_as_never_due(
    callback: Callable[[], Callback], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    played(max_steps=2, directory=tmp_path, callbacks=[callback()])
    assert 'never fires in this run: a loop of cadenza.attach has no epochs. Use a schedule in "steps" or "min"' in caplog.text


def test_a_schedule_in_parts_of_an_epoch_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"LogTraining: .* a loop of cadenza\.attach has no epochs"):
        played(max_steps=2, callbacks=[LogTraining("0.5 epoch")])


def in_a_step() -> Generator[Run, None, None]:
    with attached() as loop, loop.step():
        loop.backward(loop.run.model(torch.ones(1, 2)).sum())
        loop.update()
        yield loop.run


def in_a_batch() -> Generator[Run, None, None]:
    with attached() as loop, loop.step(), loop.batch(torch.ones(1, 2)):
        yield loop.run


def between_steps() -> Generator[Run, None, None]:
    with attached() as loop:
        one_step(loop)
        assert not loop.over()
        yield loop.run


def in_steps() -> Generator[Run, None, None]:
    trainer = tiny_trainer(epochs=1)
    with trainer.steps() as steps:
        for step in steps:
            for inputs, _ in step:
                step.backward(step.run.model(inputs).sum())
            yield step.run


@pytest.mark.parametrize("generator", [in_a_step, in_a_batch, between_steps, in_steps])
def test_a_generator_that_is_closed_leaves_its_loop_as_break_does(generator: Callable[[], Generator[Run, None, None]]) -> None:
    running = generator()
    run = next(running)
    running.close()
    assert run.outcome == Outcome("stopped", "the loop was left")
    assert run.progress.step == 1


def test_a_cancelled_task_ends_its_run_with_this_error() -> None:
    runs: list[Run] = []

    async def train() -> None:
        with attached() as loop:
            runs.append(loop.run)
            while not loop.over():
                one_step(loop)
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(train())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert runs[0].outcome == Outcome("failed", "CancelledError()")


# -- what it counts ---------------------------------------------------------------------------------


def test_no_number_is_shown_of_what_a_loop_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    parts = [LogTraining("2 steps"), Timer(), Console(epochs=True), ProgressBar("plain")]
    run = played(max_steps=4, directory=directory, callbacks=parts).run
    shown = capsys.readouterr().out
    assert re.search(r"^step 2  train/loss \S+ +train/lr 0.1  train/steps_per_s ", shown, re.MULTILINE)
    assert re.search(r"^finished after 4 steps, ", shown, re.MULTILINE)
    assert re.search(r"^train  step 4/4  100%  loss \S+ .* steps/s$", shown, re.MULTILINE)
    assert run.history.names == ["train/loss", "train/lr", "train/steps_per_s"]
    summary = re.sub(r"<[^>]+>", " ", str(card(story_at(directory), None)))
    following = Following(directory)
    following.update()
    texts = [shown, summary, small(run), *lines(following, 100, 40)]
    for text in texts:
        assert not re.search(r"epoch|sample", text), text


def test_decisions_name_no_epoch_and_no_batch_that_the_loop_does_not_have() -> None:
    with attached() as loop:
        one_step(loop)
        loop.run.stop("enough")
        assert loop.over()
    assert loop.run.why("stopped") == "stopped by the script at step 1: enough"


def test_batches_that_the_loop_names_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run = played(batches=True, max_steps=4, callbacks=[LogTraining("2 steps"), Console()]).run
    assert (run.progress.batch, run.progress.samples) == (4, 16)
    assert "train/samples_per_s" in run.history.names
    shown = capsys.readouterr().out
    assert "train/samples_per_s" in shown
    assert "epoch" not in shown
    assert "finished after 4 steps" in shown


def test_what_depends_on_the_batches_of_the_loop_is_not_known_beforehand() -> None:
    calendar = attached(max_steps=6, callbacks=[LogTraining("2 batches"), LogTraining("3 steps")]).trainer.calendar()
    assert [call.step for call in calendar.rows] == [3, 6]
    assert [why for _, _, why in calendar.unknown] == ["the loop decides which batches a step has"]


def test_hooks_of_the_fetch_are_named_as_never_called(caplog: pytest.LogCaptureFixture) -> None:
    class Fetched(Callback):
        def on_fetch_end(self, run: Run) -> None:
            raise AssertionError

    loop = played(max_steps=2, callbacks=[Fetched(), Timer()])
    why = "a loop of cadenza.attach brings its own batches"
    assert f"! Fetched, on_fetch_end, never fires: {why}" in str(loop.trainer.plan()).splitlines()
    assert caplog.text.count(f"never fires in this run: {why}") == 1
