"""`trainer.steps()` on two gloo processes: the weights of `Trainer.fit`, and ranks that leave out batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.errors import DistributedError
from cadenza.testing import launch
from tests.distributed.parts import Batch, network, rank, squared_error, trainer, weights_of


def by_hand(one: Trainer, **fit: Any) -> Run:
    for step in one.steps(**fit):
        for batch in step:
            step.backward(step.forward(squared_error, batch))
    return one.run


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_weights_are_those_of_fit(accumulate: int) -> None:
    def train() -> tuple[Tensor, Tensor, Any, Any]:
        arguments: dict[str, Any] = {"accumulate": accumulate, "callbacks": [LogTraining("1 step")]}
        one, other = trainer(**arguments), trainer(**arguments)
        losses = one.fit().history["train/loss"], by_hand(other).history["train/loss"]
        return weights_of(one), weights_of(other), *losses

    first, second = launch(train)
    torch.testing.assert_close(first[0], first[1])
    assert torch.equal(first[1], second[1])
    assert [step for step, _ in first[2]] == [step for step, _ in first[3]]
    torch.testing.assert_close([loss for _, loss in first[2]], [loss for _, loss in first[3]])


def test_a_rank_may_leave_out_batches_and_all_of_a_step() -> None:
    """The gradient is the mean over the batches that had a backward pass, of all ranks."""

    def train() -> tuple[list[list[Batch]], list[Tensor]]:
        one = trainer(accumulate=2, max_steps=2, optimizer=plain_sgd, callbacks=[LogTraining("1 step")])
        taken: list[list[Batch]] = []
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


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def test_a_rank_that_leaves_the_loop_stops_all() -> None:
    def train() -> tuple[int, str, Tensor]:
        one = trainer(accumulate=2, max_epochs=5)
        for step in one.steps():
            for batch in step:
                step.backward(squared_error(one.model, batch))
                if rank() == 1 and one.run.progress.step == 1:
                    break
            if rank() == 1 and one.run.progress.step == 1:
                break
        assert one.run.outcome is not None
        return one.run.progress.step, one.run.outcome.kind, weights_of(one)

    first, second = launch(train)
    assert first[:2] == second[:2] == (2, "stopped")
    assert torch.equal(first[2], second[2])


def test_an_error_in_the_loop_of_one_rank_ends_all() -> None:
    def train() -> None:
        one = trainer()
        for step in one.steps():
            for batch in step:
                if rank() == 1 and one.run.progress.step == 2:
                    raise ZeroDivisionError("on purpose")
                step.backward(squared_error(one.model, batch))

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(train)
    first, second = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, DistributedError)


def test_both_ranks_continue_to_the_same_bits(tmp_path: Any) -> None:
    def run_in(name: str, steps: int) -> Tensor:
        one = trainer(model=network(dropout=0.3), directory=tmp_path / name, max_steps=steps, max_epochs=None, accumulate=2,
                      callbacks=[Checkpoint("1 step")])  # fmt: skip
        by_hand(one, resume="auto")
        return weights_of(one)

    def both() -> tuple[Tensor, Tensor]:
        whole = run_in("whole", 5)
        run_in("cut", 2)
        torch.manual_seed(99)
        return whole, run_in("cut", 5)

    for whole, continued in launch(both):
        assert torch.equal(whole, continued)
