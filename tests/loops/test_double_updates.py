"""Lines of the hand-written loop that were left in it: an error in the first step says which to remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from cadenza import Trainer, attach
from cadenza.callbacks import LearningRate
from cadenza.errors import LossError

BATCHES = [torch.ones(4, 2) for _ in range(6)]


class Script:
    """A model, its optimizer, and the loops around them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def loss(self) -> Tensor:
        return self.model(BATCHES[0]).mean()  # type: ignore[no-any-return]

    def over_steps(self, before: Callable[[], Any], after: Callable[[], Any], **arguments: Any) -> Trainer:
        trainer = Trainer(self.model, self.optimizer, BATCHES, **{"max_epochs": 1, "progress": False, **arguments})
        for step in trainer.steps():
            for _ in step:
                loss = self.loss()
                before()
                step.backward(loss)
                after()
        return trainer

    def attached(self, before: Callable[[], Any], after: Callable[[], Any], **arguments: Any) -> None:
        with attach(self.model, self.optimizer, **{"max_steps": 3, "progress": False, **arguments}) as loop:
            while not loop.over():
                with loop.step():
                    loss = self.loss()
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
def test_gradients_that_are_dropped_after_the_backward_pass_are_an_error(loop: Callable[..., None]) -> None:
    script = Script()
    with pytest.raises(LossError, match=r"gradients of step 1 were dropped before .*Remove optimizer\.zero_grad\(\)"):
        loop(script, nothing, script.optimizer.zero_grad)


def test_gradients_that_are_dropped_before_each_batch_are_an_error_with_accumulation() -> None:
    script = Script()
    with pytest.raises(LossError, match=r"dropped before the next batch.*Remove optimizer\.zero_grad\(\)"):
        script.over_steps(script.optimizer.zero_grad, nothing, accumulate=2)


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_may_be_dropped_before_the_only_backward_pass(loop: Callable[..., None]) -> None:
    script = Script()
    loop(script, script.optimizer.zero_grad, nothing)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_schedule_that_the_loop_steps_beside_the_run_is_an_error(loop: Callable[..., None]) -> None:
    script = Script()
    schedule = LinearLR(script.optimizer, 1.0, 0.5, total_iters=6)
    with pytest.raises(RuntimeError, match=r"LearningRate.*Remove scheduler\.step\(\) from the loop"):
        loop(script, nothing, schedule.step, callbacks=[LearningRate(schedule)])
