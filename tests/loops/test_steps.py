"""`trainer.steps()`: the loop is the user's, and the run is the one of `Trainer.fit`, also on two gloo processes."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Steps, Trainer, attach, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LogTraining
from cadenza.engine.session import UNDER_WAY
from cadenza.errors import DistributedError, LossError
from cadenza.status.decisions import Outcome
from cadenza.testing import Recorder, launch, prove_resume
from tests.distributed.parts import network, rank, squared_error, weights_of
from tests.distributed.parts import trainer as rank_trainer

Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": loss_of(model, batch), "weight": float(batch[0].sum().abs())}


def trainer(compute: Any = None, **arguments: Any) -> Trainer:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    loader = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(7)]
    arguments = {"max_epochs": 3, "seed": 1, "progress": False, **arguments}
    return Trainer(model, torch.optim.AdamW(model.parameters(), 0.01), loader, compute, **arguments)


def by_hand(one: Trainer, loss: Callable[[nn.Module, Any], Any] = loss_of, **fit: Any) -> Run:
    for step in one.steps(**fit):
        for batch in step:
            step.backward(step.forward(loss, batch))
    return one.run


def forward(one: Trainer, step: Any) -> None:
    for batch in step:
        step.backward(loss_of(one.model, batch))


def weights(one: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in one.model.parameters()]


@pytest.mark.parametrize("loss", [loss_of, weighted])
@pytest.mark.parametrize("arguments", [{}, {"accumulate": 3}, {"precision": "bf16"}, {"accumulate": 4, "max_steps": 5}])
def test_the_moments_the_records_and_the_bits_are_those_of_fit(arguments: dict[str, Any], loss: Any) -> None:
    seen, ran, final = [], [], []
    for train in (lambda one: one.fit(), lambda one: by_hand(one, loss)):
        recorder = Recorder()
        one = trainer(loss, **arguments, callbacks=[recorder, LogTraining("1 step")])
        ran.append(train(one))
        seen.append(recorder.seen)
        final.append(weights(one))
    assert seen[0] == seen[1]
    assert ran[0].history["train/loss"] == ran[1].history["train/loss"]
    assert ran[0].outcome == ran[1].outcome
    assert all(map(torch.equal, *final))


def test_an_update_takes_place_when_it_is_called_or_at_the_end_of_the_step() -> None:
    final = []
    for early in (True, False):
        one, moved = trainer(accumulate=2), []
        for step in one.steps():
            before = weights(one)
            forward(one, step)
            if early:
                step.update()
                step.update()
            moved.append(not torch.equal(before[0], weights(one)[0]))
        assert set(moved) == {early}
        final.append(weights(one))
    assert all(map(torch.equal, *final))


def test_callbacks_evaluate_stop_and_save_as_in_fit(tmp_path: Path) -> None:
    rows = [(torch.randn(4, 3), torch.randn(4, 1))]
    evaluate = Evaluate(rows, compute=lambda model, batch: {"loss": loss_of(model, batch)})
    stopping = EarlyStopping("eval/loss", "min", patience=2, min_delta=100)
    one = trainer(callbacks=[evaluate, stopping, Checkpoint("1 step")], max_epochs=50, directory=tmp_path)
    with pytest.raises(AttributeError, match="none has begun"):
        one.run  # noqa: B018
    run = by_hand(one)
    assert (run.outcome.kind, run.progress.epoch) == ("stopped", 3)  # type: ignore[union-attr]


def test_a_batch_without_a_backward_pass_counts_for_nothing() -> None:
    """The mean of the step is that of the other batches."""
    one = trainer(accumulate=2, max_steps=1)
    torch.manual_seed(3)
    for step in one.steps():
        for number, batch in enumerate(step):
            if number:
                continue
            step.backward(loss_of(one.model.eval(), batch))
    other = trainer(lambda model, batch: loss_of(model.eval(), batch), max_steps=1)
    other.fit()
    assert all(map(torch.equal, weights(one), weights(other)))
    assert one.run.progress.batch == 2


def test_batches_that_a_step_does_not_take_are_skipped() -> None:
    one = trainer(accumulate=3, max_epochs=1)
    taken = []
    for number, step in enumerate(one.steps()):
        if number == 1:
            continue
        for batch in step:
            taken.append(one.run.progress.batch)
            step.backward(loss_of(one.model, batch))
            break
    assert taken == [0, 6]
    assert (one.run.progress.batch, one.run.progress.step) == (7, 3)


def broken(one: Trainer) -> None:
    for step in one.steps():
        forward(one, step)
        if one.run.progress.step == 3:
            break


def returned(one: Trainer) -> None:
    for step in one.steps():
        for batch in step:
            step.backward(loss_of(one.model, batch))
            if one.run.progress.step == 3:
                return


def broken_while_held(one: Trainer) -> None:
    steps = one.steps()
    for step in steps:
        forward(one, step)
        if one.run.progress.step == 3:
            break
    assert one.run.outcome is not None  # the run is over here, and not when the variable is deleted
    assert [*steps] == []


def failed(one: Trainer) -> None:
    """Leave the loop with an error, while an earlier one, which was handled, is still held."""
    handled = []
    try:
        raise LookupError("handled")
    except LookupError as error:
        handled.append(error)

    def loop() -> None:
        for step in one.steps():
            forward(one, step)
            if one.run.progress.step == 3:
                raise KeyError("the error of the loop")

    with pytest.raises(KeyError, match="the error of the loop"):
        loop()


def broken_inside_with(one: Trainer) -> None:
    with one.steps() as steps:
        for step in steps:
            forward(one, step)
            if one.run.progress.step == 3:
                break


def returned_inside_with(one: Trainer) -> None:
    with one.steps() as steps:
        for step in steps:
            for batch in step:
                step.backward(loss_of(one.model, batch))
                if one.run.progress.step == 3:
                    return


def closed(one: Trainer) -> None:
    steps = one.steps()
    for _ in range(4):
        forward(one, next(steps))
    steps.close()


STOPPED = Outcome("stopped", "the loop was left")
WITH = "write `with trainer.steps() as steps:` to record the reason"
LEFT = Outcome("left", f"the loop was left; {WITH}")


@pytest.mark.parametrize(
    ("leave", "outcome"),
    [
        *((loop, LEFT) for loop in (broken, returned, broken_while_held, failed)),
        *((loop, STOPPED) for loop in (broken_inside_with, returned_inside_with, closed)),
    ],
)
def test_a_loop_that_is_left_completes_its_step_and_saves_and_with_says_how_it_was_left(
    leave: Callable[[Trainer], None], outcome: Outcome, tmp_path: Path
) -> None:
    recorder = Recorder()
    one = trainer(callbacks=[recorder, Checkpoint("100 steps")], directory=tmp_path)
    leave(one)
    assert one.run.outcome == outcome
    assert one.run.progress.step == 4
    assert_paired(recorder)
    ends = [name for name in recorder.names if name not in ("on_save", "on_log")]
    assert ends[-3:] == ["on_stop", "on_epoch_end", "on_fit_end"]
    again = trainer(directory=tmp_path)
    if outcome is STOPPED:
        assert [*again.steps(resume="auto")] == []  # a run that was stopped is over
        assert all(map(torch.equal, weights(one), weights(again)))
    by_hand(again, squared_error, resume="auto" if outcome is LEFT else "last")
    assert again.run.progress.origin.step == 4
    assert again.run.outcome == Outcome("finished", "the limit is reached")


def test_a_loop_whose_iterator_is_kept_ends_when_another_run_begins_and_says_so_if_it_goes_on(tmp_path: Path) -> None:
    def begun(name: str) -> tuple[Trainer, Iterator[Any]]:
        one = trainer(directory=tmp_path / name, callbacks=[Checkpoint("100 steps")])
        steps = iter(one.steps())
        forward(one, next(steps))
        return one, steps

    begins: list[Callable[[], object]] = [
        lambda: trainer(loss_of).fit(),
        lambda: [*trainer().steps()],
        lambda: enter(trainer()),
    ]
    for number, begin in enumerate(begins):
        one, steps = begun(f"run {number}")
        begin()
        assert one.run.outcome == Outcome(
            "left", "another run began; write `with trainer.steps() as steps:` to record the reason"
        )
        assert (tmp_path / f"run {number}/checkpoints/step-00000001").is_dir()
        with pytest.raises(
            RuntimeError, match=r"was ended: another run began. Write `with trainer.steps\(\) as steps:` around it"
        ):
            next(steps)
        shutil.rmtree(tmp_path / f"run {number}")  # the lock is free, too: the same directory takes another run
        trainer(loss_of, directory=tmp_path / f"run {number}").fit()


def enter(one: Trainer) -> None:
    with attach(one.model, one.optimizer, max_steps=1, progress=False) as loop, loop.step():
        loop.update()


def test_a_run_that_a_hook_begins_does_not_end_the_loop_around_it() -> None:
    one = trainer(callbacks=[on(Callback.on_step_end)(lambda run: trainer(loss_of).fit())])
    by_hand(one)
    assert one.run.outcome == Outcome("finished", "the limit is reached")


def assert_paired(recorder: Recorder) -> None:
    for kind in ("fit", "epoch", "step", "batch", "fetch"):
        assert recorder.names.count(f"on_{kind}_start") == recorder.names.count(f"on_{kind}_end"), kind


def train(one: Trainer, step: Any, error: Callable[[], object]) -> None:
    forward(one, step)
    if one.run.progress.step == 2:
        error()


def fails(one: Trainer, error: Callable[[], object]) -> None:
    with one.steps() as steps:
        for step in steps:
            train(one, step, error)


def fails_behind_a_generator(one: Trainer, error: Callable[[], object]) -> None:
    with one.steps() as steps:
        for step in (step for step in steps):  # as progress bars such as tqdm are
            train(one, step, error)


def fails_from_finally(one: Trainer, error: Callable[[], object]) -> None:
    """An earlier error, which was handled, is still held: the one that leaves the loop counts."""
    handled: list[ValueError] = []
    with one.steps() as steps:
        for step in steps:
            try:
                if not handled:
                    raise ValueError("handled")
            except ValueError as earlier:
                handled.append(earlier)
            try:
                train(one, step, error)
            finally:
                one.model.train()


def fails_before_the_batches(one: Trainer, error: Callable[[], object]) -> None:
    with one.steps() as steps:
        for _ in steps:
            error()


def fails_in_a_hook(one: Trainer, error: Callable[[], object]) -> None:
    """An error that the run itself raises is known without ``with``."""
    one.callbacks.append(on(Callback.on_after_backward, at=3)(lambda run, outputs: error()))
    for step in one.steps():
        train(one, step, lambda: None)


def on_purpose() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    "loop", [fails, fails_behind_a_generator, fails_from_finally, fails_before_the_batches, fails_in_a_hook]
)
def test_an_error_in_the_loop_ends_the_run_as_in_fit(loop: Callable[..., None], tmp_path: Path) -> None:
    recorder, errors = Recorder(), []
    keep = on(Callback.on_exception)(lambda run, error: errors.append(error))
    one = trainer(callbacks=[recorder, keep], directory=tmp_path)
    with pytest.raises(ValueError, match="on purpose") as caught:
        loop(one, on_purpose)
    assert errors == [caught.value]
    assert caught.traceback[-1].name == "on_purpose"
    assert one.run.outcome == Outcome("failed", "ValueError('on purpose')")
    assert_paired(recorder)
    by_hand(trainer(directory=tmp_path / "b"))


def test_a_step_that_is_over_and_a_second_backward_pass_are_refused() -> None:
    one, earlier = trainer(max_steps=2), []
    for step in one.steps():
        for batch in step:
            loss = loss_of(one.model, batch)
            step.backward(loss)
            with pytest.raises(LossError, match="twice for one batch"):
                step.backward(loss)
        earlier.append(step)
        if len(earlier) == 2:
            with pytest.raises(RuntimeError, match="this step is over"):
                earlier[0].update()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_break_an_error_of_a_hook_is_raised_inside_with_and_printed_in_a_for_loop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @on(Callback.on_fit_end)
    def fail(run: Run) -> None:
        raise OSError("the file is gone")

    def broken_inside_with() -> None:
        with trainer(callbacks=[fail]).steps() as steps:
            for _ in steps:
                break

    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: printed.append(str(one.exc_value)))
    for _ in trainer(callbacks=[fail]).steps():
        break
    assert [text.partition("\n")[0] for text in printed] == ["the file is gone"]
    with pytest.raises(OSError, match="the file is gone"):
        broken_inside_with()


def test_of_two_loops_that_take_turns_each_ends_its_own_run() -> None:
    first, second = trainer(), trainer()
    with first.steps() as one, second.steps() as other:
        next(one)
        next(other)
        one.close()
        assert [session.run for session in UNDER_WAY] == [second.run]
    assert UNDER_WAY == []


def loop(steps: Steps, *, keeps: bool = True) -> None:
    dice = random.Random(6)
    if keeps:
        steps.keep("dice", dice)
    for step in steps:
        for batch in step:
            step.backward(step.forward(loss_of, batch) * dice.random())


def test_the_loop_resumes_bit_for_bit_with_what_it_keeps() -> None:
    def make(directory: Path) -> Trainer:
        return trainer(accumulate=2, directory=directory)

    prove_resume(make, at=[1, 9], loop=loop, in_process=True)
    with pytest.raises(AssertionError, match="differs from the whole one"):
        prove_resume(make, at=[2], loop=partial(loop, keeps=False), in_process=True)


def test_objects_are_kept_before_the_loop() -> None:
    steps, own = trainer().steps(), random.Random(6)
    with pytest.raises(TypeError, match=r"keep\('none', ...\) expected an object with state_dict"):
        steps.keep("none", object())
    steps.keep("own", own)
    with pytest.raises(ValueError, match="called twice"):
        steps.keep("own", own)
    for _ in steps:
        with pytest.raises(RuntimeError, match="must be called before the loop"):
            steps.keep("late", own)
        break


def test_at_the_end_of_the_process_a_loop_that_a_variable_holds_is_left_and_a_paused_run_ends(tmp_path: Path) -> None:
    script = """
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer
steps = iter(tiny_trainer(directory="held", callbacks=[Checkpoint("100 steps")]).steps())
for _ in range(2):
    step = next(steps)
    for inputs, _ in step:
        step.backward(step.run.model(inputs).square().mean())
handle = tiny_trainer(steps=1_000_000, directory="paused").start()
handle.pause()
"""
    # A real end of an interpreter: that of a fork of another process does less.
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr
    assert json.loads((tmp_path / "held" / "run.json").read_text())["outcome"]["kind"] == "left"
    assert (tmp_path / "held" / "checkpoints" / "step-00000002").is_dir()
    assert "the script is over while the run is paused" in (tmp_path / "paused" / "decisions.jsonl").read_text()


def test_the_weights_are_those_of_fit() -> None:
    def train() -> list[tuple[Any, Tensor, Any, Tensor]]:
        pairs = []
        for accumulate in (1, 2):
            arguments: dict[str, Any] = {"accumulate": accumulate, "callbacks": [LogTraining("1 step")]}
            one, other = rank_trainer(**arguments), rank_trainer(**arguments)
            losses = one.fit().history["train/loss"], by_hand(other, squared_error).history["train/loss"]
            pairs.append((losses[0], weights_of(one), losses[1], weights_of(other)))
        return pairs

    for first, second in zip(*launch(train), strict=True):
        torch.testing.assert_close(first[1], first[3])
        assert torch.equal(first[3], second[3])
        assert [step for step, _ in first[0]] == [step for step, _ in first[2]]
        torch.testing.assert_close([loss for _, loss in first[0]], [loss for _, loss in first[2]])


def test_a_rank_may_leave_out_batches_and_all_of_a_step() -> None:
    """The gradient is the mean over the batches that had a backward pass, of all ranks."""
    plain_sgd = partial(torch.optim.SGD, lr=0.05)

    def train() -> tuple[list[list[Any]], list[Tensor]]:
        one = rank_trainer(accumulate=2, max_steps=2, optimizer=plain_sgd, callbacks=[LogTraining("1 step")])
        taken: list[list[Any]] = []
        after = [weights_of(one)]
        for number, step in enumerate(one.steps()):
            taken.append([])
            for index, batch in enumerate(step):
                if rank() == 1 and (number == 1 or index == 0):
                    continue
                taken[-1].append(batch)
                step.backward(squared_error(one.model, batch))
            step.update()
            after.append(weights_of(one))
        return taken, after

    (taken, after), (others, same) = launch(train)
    assert [len(batches) for batches in (*taken, *others)] == [2, 1, 1, 0]
    assert all(map(torch.equal, after, same))
    model = network()
    for number, step in enumerate(zip(taken, others, strict=True)):
        batches = [*step[0], *step[1]]
        model.zero_grad()
        torch.stack([squared_error(model, batch) for batch in batches]).mean().backward()
        plain_sgd(model.parameters()).step()
        torch.testing.assert_close(torch.cat([one.detach().flatten() for one in model.parameters()]), after[number + 1])


def test_a_rank_that_leaves_the_loop_stops_all_and_both_continue_to_the_same_bits(tmp_path: Path) -> None:
    def left() -> tuple[int, str, Tensor]:
        one = rank_trainer(accumulate=2, max_epochs=5)
        with one.steps() as steps:
            for step in steps:
                for batch in step:
                    step.backward(squared_error(one.model, batch))
                    if rank() == 1 and one.run.progress.step == 1:
                        break
                if rank() == 1 and one.run.progress.step == 1:
                    break
        return one.run.progress.step, one.run.outcome.kind, weights_of(one)  # type: ignore[union-attr]

    def run_in(name: str, steps: int) -> Tensor:
        arguments: dict[str, Any] = {"directory": tmp_path / name, "max_steps": steps, "max_epochs": None, "accumulate": 2}
        one = rank_trainer(model=network(dropout=0.3), callbacks=[Checkpoint("1 step")], **arguments)
        by_hand(one, squared_error, resume="auto")
        return weights_of(one)

    def both() -> tuple[tuple[int, str, Tensor], Tensor, Tensor]:
        stopped, whole = left(), run_in("whole", 5)
        run_in("cut", 2)
        torch.manual_seed(99)
        return stopped, whole, run_in("cut", 5)

    (first, *bits), (second, *others) = launch(both)
    assert first[:2] == second[:2] == (2, "stopped")
    for one, other in ((first[2], second[2]), bits, others):
        assert torch.equal(one, other)


def test_an_error_in_the_loop_of_one_rank_ends_all() -> None:
    def train() -> None:
        one = rank_trainer()
        with one.steps() as steps:
            for step in steps:
                for batch in step:
                    if rank() == 1 and one.run.progress.step == 2:
                        raise ZeroDivisionError("on purpose")
                    step.backward(squared_error(one.model, batch))

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(train)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, DistributedError]
