"""Mistakes in a loop of one's own are reported when they are made: lines left in it, and what it does not keep."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from cadenza import Loop, Steps, Trainer, attach
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, Swa
from cadenza.errors import CallbackError, CheckpointMismatchError, LossError, StateError
from cadenza.status.decisions import Outcome
from cadenza.testing import launch

BATCHES = [torch.ones(4, 2) for _ in range(6)]


def trainer(loader: Any = BATCHES, **arguments: Any) -> Trainer:
    model = nn.Linear(2, 1)
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, **{"max_epochs": 1, "progress": False, **arguments})


def attached(model: nn.Module | None = None, **arguments: Any) -> Loop:
    model = model or nn.Linear(2, 1)
    arguments = {"max_steps": 2, "progress": False, **arguments}
    return attach(model, torch.optim.SGD(model.parameters(), 0.1), **arguments)


def loss_of(one: Trainer | Loop) -> Tensor:
    return one.run.model(BATCHES[0]).mean()  # type: ignore[no-any-return]


def over_steps(one: Trainer) -> Iterator[None]:
    for step in one.steps():
        for _ in step:
            step.backward(loss_of(one))
        yield


def finish(loop: Loop, *, backward: bool = True) -> None:
    while not loop.over():
        with loop.step():
            if backward:
                loop.backward(loss_of(loop))
            loop.update()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("of the loss", r"Call step\.backward\(loss\) instead of loss\.backward\(\)"),
        ("before the batches", "must be called inside of `for batch in step:`"),
        ("after the batches", "must be called inside of `for batch in step:`"),
        ("of a number", r"step\.backward\(\.\.\.\) expects the loss .*got 'float'"),
    ],
)
def test_a_misplaced_backward_pass_is_an_error_in_the_first_step(place: str, message: str) -> None:
    def misplaced() -> None:
        for step in one.steps():
            if place == "before the batches":
                step.backward(loss_of(one))
            for _ in step:
                loss = loss_of(one)
                if place == "of the loss":
                    loss.backward()
                elif place == "of a number":
                    step.backward(1.0)
            if place == "after the batches":
                step.backward(loss)

    one = trainer()
    with pytest.raises(LossError, match=message) as caught:
        misplaced()
    assert one.run.progress.step == 0
    assert "compute_loss" not in "".join(caught.value.__notes__ if hasattr(caught.value, "__notes__") else ())


def test_an_update_that_skips_batches_is_reported_once_and_the_last_step_is_over(caplog: pytest.LogCaptureFixture) -> None:
    one = trainer(accumulate=3)
    for step in one.steps():
        for _ in step:
            step.backward(loss_of(one))
            step.update()
    assert caplog.text.count("step.update() skipped 2 batches of step 1") == 1
    assert repr(step) == "<Step: over>"
    for use in (step.update, lambda: step.backward(loss_of(one))):
        with pytest.raises(RuntimeError, match="this step is over"):
            use()


def test_a_name_of_the_run_that_is_read_of_a_step_or_of_a_loop_says_where_it_is() -> None:
    steps = trainer().steps()
    with pytest.raises(AttributeError, match=r"a Steps has no 'run': read trainer\.run, or step\.run"):
        steps.run  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"a Step has no 'log': it belongs to the run: step\.run\.log"):
        next(steps).log("a", 1)  # type: ignore[attr-defined]
    loop = attached()
    with pytest.raises(AttributeError, match=r"a Loop has no 'model': it belongs to the run: loop\.run\.model"), loop:
        loop.model  # type: ignore[attr-defined]  # noqa: B018
    assert "log" not in dir(loop)


def test_two_runs_of_one_trainer_at_once_are_refused_and_two_trainers_may_take_turns() -> None:
    one = trainer()
    with one.steps() as steps, pytest.raises(RuntimeError, match="has a run that is not over"):
        [*zip(steps, one.steps(), strict=True)]

    other = trainer(max_epochs=2)
    with trainer().steps() as short, other.steps() as long:
        for _ in long:
            next(short, None)
    assert other.run.outcome == Outcome("finished", "the limit is reached")


@pytest.mark.parametrize("model", ["model", [nn.Linear(1, 1), 3], {"a": None}, torch.optim.SGD])
def test_the_model_must_be_a_module_or_several(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, or a sequence or mapping"):
        attach(model, torch.optim.SGD, max_steps=1)


def test_what_a_loop_does_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="takes no step_fn="):
        trainer(step_fn=lambda run, batch: None).steps()
    with pytest.raises(CallbackError, match="callbacks must be a list"):
        attached(callbacks=None)
    with attached() as loop:
        finish(loop)
    for again in (loop.__enter__, lambda: loop.resuming("auto")):
        with pytest.raises(RuntimeError, match="runs once"):
            again()
    with pytest.raises(RuntimeError, match="the loop does its steps"):
        attached().trainer.fit()
    other = torch.optim.SGD(nn.Linear(2, 1).parameters())
    with pytest.raises(ValueError, match="expected optimizers of the run"), attached() as loop, loop.step():
        loop.update(other)
    with pytest.raises(ValueError, match=r"evaluation 'eval' does not say how to compute a batch.*compute=function"):
        attached(callbacks=[Evaluate(BATCHES, every="1 step")]).__enter__()
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"loop of cadenza\.attach.*Swa\(update_batch_norm=0\)"):
        attached(model=normed, max_steps=4, callbacks=[Swa(start="2 steps")]).__enter__()


def test_updates_without_gradients_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with attached() as loop:
        finish(loop, backward=False)
    assert caplog.text.count("no update of run.optimizers[0] (SGD) has had a gradient") == 1


def test_updates_outside_of_steps_are_an_error_and_not_an_endless_loop() -> None:
    def updates(*, steps: bool) -> Loop:
        with attached() as loop:
            while not loop.over():
                loss_of(loop).backward()
                loop.run.optimizers[0].step()
                loop.run.optimizers[0].zero_grad()
                if steps:  # updates before a step are the user's own
                    with loop.step():
                        loop.backward(loss_of(loop))
                        loop.update()
        return loop

    with pytest.raises(LossError, match=r"outside of a step, so the run would never end.*with loop\.step\(\)"):
        updates(steps=False)
    assert updates(steps=True).run.progress.step == 2


@pytest.mark.parametrize("make", [attached, lambda: trainer().steps()], ids=["attach", "steps"])
def test_the_end_of_an_iterator_in_a_loop_stays_what_it_is(make: Callable[[], Any]) -> None:
    def exhausted() -> None:
        with make() as loop:
            for _ in loop if isinstance(loop, Steps) else iter(loop.over, True):
                next(iter(()))

    with pytest.raises(StopIteration):
        exhausted()


def test_a_loop_that_does_all_its_steps_has_finished_without_asking_over() -> None:
    def train() -> Any:
        with attached() as loop:
            for _ in range(2):
                with loop.step():
                    loop.backward(loss_of(loop))
                    loop.update()
        return loop.run.outcome and loop.run.outcome.kind

    assert [train(), *launch(train)] == ["finished"] * 3


@pytest.mark.parametrize(
    ("name", "held", "error", "message"),
    [
        ("env", nn.Linear, TypeError, "expected an object with state_dict"),
        ("env", random.SystemRandom(), TypeError, "expected an object with state_dict"),
        (random.Random(), "env", TypeError, "expected a name"),
        ("env", (lambda: {"a": object()}, print), StateError, r"loop\.keep\('env', \.\.\.\)\.a cannot be saved"),
        ("env", (lambda: vars(nn)["a"], print), KeyError, "a"),
        ("env", (lambda: {"seen": np.ones(2)}, print), StateError, r"got ndarray\. Save torch\.as_tensor\(array\)"),
        ("rows", (lambda: deque([1]), print), StateError, "got deque. Save it as a list"),
        ("rows", deque([1]), TypeError, r"A pair for a list is \(lambda: \[\*rows\], rows\.extend\)"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_once(name: Any, held: Any, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message), attached(callbacks=[Checkpoint("1 step")], directory=tmp_path) as loop:
        loop.keep(name, held)


def continued(directory: Path, steps: int, strict: bool = False, **kept: Any) -> None:
    callbacks = [Checkpoint("1 step")]
    with attached(max_steps=steps, directory=directory, callbacks=callbacks, resume="auto", strict=strict) as loop:
        for name, held in kept.items():
            loop.keep(name, held)
        finish(loop)


def test_what_is_kept_under_another_name_or_cannot_be_restored_is_reported_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    continued(tmp_path, 2, env=random.Random(1), dice=(dice := np.random.RandomState(1)))
    with pytest.raises(CheckpointMismatchError, match="which this loop does not keep"):
        continued(tmp_path, 3, strict=True, world=random.Random(1), dice=np.random.RandomState(1))
    with pytest.raises(TypeError) as caught:
        continued(tmp_path, 3, env=torch.Generator(), dice=np.random.RandomState(1))
    assert "loop.keep('env', ...)" in "".join(caught.value.__notes__)
    continued(tmp_path, 3, world=random.Random(1), dice=(again := np.random.RandomState(2)))
    assert dice.randn(3).tolist() == again.randn(3).tolist()  # a legacy generator of NumPy
    assert "the checkpoint holds ['env'], which this loop does not keep" in caplog.text
    assert "this loop keeps ['world'], which the checkpoint does not hold" in caplog.text


def test_an_evaluation_that_cannot_call_the_model_is_refused_in_the_first_step_of_a_loop_over_steps() -> None:
    pairs = [(batch, batch) for batch in BATCHES]
    with pytest.raises(ValueError, match=r"call the model with a whole batch.*Give Evaluate\(\.\.\., compute=function\)"):
        [*over_steps(trainer(callbacks=[Evaluate(pairs)], loader=pairs))]
    with pytest.raises(LossError, match="the loss of 'eval' must have shape") as caught:
        [*over_steps(trainer(callbacks=[Evaluate(BATCHES)]))]
    assert "Give Evaluate(..., compute=function)" in "".join(caught.value.__notes__)
    [*over_steps(trainer(callbacks=[Evaluate(pairs, compute=lambda model, batch: model(batch[0]).mean())], loader=pairs))]


# -- lines that were left in the loop -----------------------------------------------------------------


class Script:
    """A model, its optimizer, and the loops around them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def over_steps(self, before: Callable[[], Any], after: Callable[[], Any], **arguments: Any) -> None:
        trainer = Trainer(self.model, self.optimizer, BATCHES, **{"max_epochs": 1, "progress": False, **arguments})
        for step in trainer.steps():
            for batch in step:
                loss = self.model(batch).mean()
                before()
                step.backward(loss)
                after()

    def attached(self, before: Callable[[], Any], after: Callable[[], Any], **arguments: Any) -> None:
        with attach(self.model, self.optimizer, **{"max_steps": 3, "progress": False, **arguments}) as loop:
            while not loop.over():
                with loop.step():
                    loss = self.model(BATCHES[0]).mean()
                    before()
                    loop.backward(loss)
                    after()
                    loop.update()


def nothing() -> None:
    """Stand for no line."""


LOOPS = [Script.over_steps, Script.attached]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_by_hand_beside_that_of_the_run_is_an_error(loop: Callable[..., None], precision: str) -> None:
    script = Script()
    weights = script.model.weight.clone()
    with pytest.raises(LossError, match=r"optimizer\.step\(\) was called in step 1, beside the update of the run\. Remove"):
        loop(script, nothing, script.optimizer.step, precision=precision)
    assert torch.equal(script.model.weight, weights)
    script.optimizer.step()  # outside of the loop it is the user's own again


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_may_be_dropped_before_the_only_backward_pass_alone(loop: Callable[..., None]) -> None:
    script = Script()
    with pytest.raises(LossError, match=r"no gradients in step 1 before .*Remove optimizer\.zero_grad\(\)"):
        loop(script, nothing, script.optimizer.zero_grad)
    script = Script()
    loop(script, script.optimizer.zero_grad, nothing)
    with pytest.raises(LossError, match=r"gradients in step 1 before the next batch.*Remove optimizer\.zero_grad\(\)"):
        script.over_steps(script.optimizer.zero_grad, nothing, accumulate=2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_schedule_that_the_loop_steps_beside_the_run_is_an_error(loop: Callable[..., None]) -> None:
    script = Script()
    schedule = LinearLR(script.optimizer, 1.0, 0.5, total_iters=6)
    with pytest.raises(RuntimeError, match=r"LearningRate.*Remove scheduler\.step\(\) from the loop"):
        loop(script, nothing, schedule.step, callbacks=[LearningRate(schedule)])


# -- in a loop over trainer.steps() -----------------------------------------------------------------


def saving(directory: Path, loader: Any = None, *, save: bool = True, **arguments: Any) -> Trainer:
    """Return a trainer of 6 steps with numbers in another order in each epoch."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loader = shuffled(torch.ones(12, 1)) if loader is None else loader
    arguments = {"callbacks": [Checkpoint("2 steps")] if save else [], "directory": directory, "max_steps": 6, **arguments}
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.001), loader, progress=False, **arguments)


def shuffled(data: Any) -> Any:
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def test_each_loop_of_a_trainer_keeps_its_own_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, dice = saving(tmp_path / "one"), [random.Random(6)]

    def loop(one: Trainer, until: int, *, resume: bool = False, **kept: Any) -> None:
        with one.steps(resume=resume) as steps:
            for name, held in kept.items():
                steps.keep(name, held)
            for step in steps:
                if step.run.progress.step == until:
                    raise InterruptedError
                for batch in step:
                    step.backward(step.run.model(batch).square().mean() * dice[-1].random())

    with pytest.raises(InterruptedError):
        loop(one, 2, dice=dice[-1])
    dice.append(random.Random(7))
    loop(one, 9, resume=True, dice=dice[-1])
    whole = random.Random(6)
    assert [whole.random() for _ in range(7)][-1] == dice[-1].random()
    again = saving(tmp_path / "again")
    with pytest.raises(InterruptedError):
        loop(again, 2, dice=dice[-1])
    loop(again, 9, resume=True, other=dice[-1])
    assert "the checkpoint holds ['dice'], which this loop does not keep. Call steps.keep(...) before the loop" in caplog.text
