"""The cost of a step, counted and not timed: functions that are called, of Python and of C, beside the loop written by hand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, supervised
from cadenza.testing import tiny_trainer

Batch = tuple[Tensor, Tensor]
Work = Callable[[list[Batch]], object]

BATCH = "on_fetch_start on_fetch_end on_batch_start on_before_backward on_after_backward on_batch_end"
STEP = "on_step_start on_before_optimizer_step on_after_optimizer_step on_before_zero_grad on_after_zero_grad on_step_end"
PER_BATCH: list[Callable[..., None]] = [getattr(Callback, name) for name in BATCH.split()]
PER_STEP: list[Callable[..., None]] = [getattr(Callback, name) for name in STEP.split()]


def calls_in(work: Callable[[], object]) -> int:
    """Return how many functions are called in `work`."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what others want called when it collects is none of ours
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_a_batch(work: Work) -> float:
    """Return the calls of one more batch: those of a long run minus those of a short one."""

    def calls(count: int) -> int:
        batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]
        return calls_in(lambda: work(batches))

    calls(4)  # what torch does once
    return (calls(80) - calls(40)) / 40


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


sgd, adamw = partial(torch.optim.SGD, lr=0.01), partial(torch.optim.AdamW, lr=0.01)


def by_hand(optimizer_of: Callable[[Any], torch.optim.Optimizer] = sgd, accumulate: int = 1) -> Work:
    def work(batches: list[Batch]) -> None:
        model = nn.Linear(8, 1)
        optimizer = optimizer_of(model.parameters())
        model.train()
        for number, batch in enumerate(batches, start=1):
            loss = loss_of(model, batch)
            (loss / accumulate if accumulate > 1 else loss).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return work


def by_cadenza(
    *callbacks: Callback,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = sgd,
    accumulate: int = 1,
    compute_loss: Callable[[nn.Module, Any], Any] = loss_of,
) -> Work:
    options: dict[str, Any] = {"callbacks": callbacks, "optimizer": optimizer_of, "accumulate": accumulate}
    return lambda batches: tiny_trainer(model=nn.Linear(8, 1), loader=batches, compute_loss=compute_loss, **options).fit()


def evaluated_by_hand(batches: list[Batch]) -> float:
    model, total, count = nn.Linear(8, 1), 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            total += loss_of(model, batch).item() * len(batch[0])
            count += len(batch[0])
    return total / count


def evaluated_by_cadenza(*callbacks: Callback) -> Work:
    return lambda batches: tiny_trainer(model=nn.Linear(8, 1), compute_loss=loss_of, callbacks=callbacks).evaluate(batches)


def hearing(*moments: Callable[..., None]) -> Callback:
    """Return a callback that hears these moments and does nothing."""

    def of(moment: Callable[..., None]) -> Callable[..., None]:
        if moment in (Callback.on_batch_start, Callback.on_before_backward, Callback.on_after_backward):
            return lambda self, run, value: None
        return (lambda self, run, batch, outputs: None) if moment is Callback.on_batch_end else (lambda self, run: None)

    return type("Hearing", (Callback,), {moment.__name__: of(moment) for moment in moments})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("work", [by_cadenza, partial(by_cadenza, accumulate=4), evaluated_by_cadenza])
def test_an_idle_callback_adds_no_call_to_a_step_or_an_evaluation(work: Callable[..., Work]) -> None:
    assert calls_a_batch(work(*(Callback() for _ in range(50)))) == calls_a_batch(work())


@pytest.mark.parametrize("moment", [*PER_BATCH, *PER_STEP], ids=lambda moment: moment.__name__)
def test_a_heard_moment_adds_one_call_for_each_handler(moment: Callable[..., None]) -> None:
    bare = calls_a_batch(by_cadenza())
    assert calls_a_batch(by_cadenza(hearing(moment))) - bare == 1
    assert calls_a_batch(by_cadenza(*(hearing(moment) for _ in range(10)))) - bare == 10


def test_in_a_step_of_four_batches_the_moments_of_a_step_are_called_once() -> None:
    bare = calls_a_batch(by_cadenza(accumulate=4))
    assert calls_a_batch(by_cadenza(hearing(*PER_STEP), accumulate=4)) - bare == len(PER_STEP) / 4
    assert calls_a_batch(by_cadenza(hearing(*PER_BATCH), accumulate=4)) - bare == len(PER_BATCH)


@pytest.mark.parametrize(
    ("optimizer_of", "compute_loss"), [(sgd, loss_of), (adamw, loss_of), (sgd, supervised(nn.functional.mse_loss))]
)
def test_a_step_makes_at_most_a_quarter_more_calls_than_the_loop_written_by_hand(optimizer_of: Any, compute_loss: Any) -> None:
    ours = calls_a_batch(by_cadenza(optimizer_of=optimizer_of, compute_loss=compute_loss))
    assert ours <= 1.25 * calls_a_batch(by_hand(optimizer_of))


def test_a_further_batch_makes_at_most_22_calls_more_than_by_hand_and_one_of_an_evaluation_11() -> None:
    assert calls_a_batch(by_cadenza(accumulate=4)) - calls_a_batch(by_hand(accumulate=4)) <= 22
    assert calls_a_batch(evaluated_by_cadenza()) - calls_a_batch(evaluated_by_hand) <= 11
