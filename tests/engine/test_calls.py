"""The cost of a step, counted and not timed: functions that are called, of Python and of C, beside the loop written by hand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Trainer, supervised

Batch = tuple[Tensor, Tensor]
Work = Callable[[list[Batch]], object]

PER_BATCH: list[Callable[..., None]] = [
    Callback.on_fetch_start,
    Callback.on_fetch_end,
    Callback.on_batch_start,
    Callback.on_before_backward,
    Callback.on_after_backward,
    Callback.on_batch_end,
]
PER_STEP: list[Callable[..., None]] = [
    Callback.on_step_start,
    Callback.on_before_optimizer_step,
    Callback.on_after_optimizer_step,
    Callback.on_before_zero_grad,
    Callback.on_after_zero_grad,
    Callback.on_step_end,
]


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


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


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
    def work(batches: list[Batch]) -> None:
        model = nn.Linear(8, 1)
        Trainer(
            model,
            optimizer_of(model.parameters()),
            batches,
            compute_loss,
            max_epochs=1,
            accumulate=accumulate,
            callbacks=callbacks,
            device="cpu",
            progress=False,
        ).fit()

    return work


def evaluated_by_hand(batches: list[Batch]) -> float:
    model, total, count = nn.Linear(8, 1), 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            total += loss_of(model, batch).item() * len(batch[0])
            count += len(batch[0])
    return total / count


def evaluated_by_cadenza(*callbacks: Callback) -> Work:
    def work(batches: list[Batch]) -> None:
        model = nn.Linear(8, 1)
        Trainer(
            model, sgd(model.parameters()), batches, loss_of, max_epochs=1, callbacks=callbacks, device="cpu", progress=False
        ).evaluate(batches)

    return work


def hearing(*moments: Callable[..., None]) -> Callback:
    """Return a callback that hears these moments and does nothing."""

    def of(moment: Callable[..., None]) -> Callable[..., None]:
        if moment in (Callback.on_batch_start, Callback.on_before_backward, Callback.on_after_backward):
            return lambda self, run, value: None
        return (lambda self, run, batch, outputs: None) if moment is Callback.on_batch_end else (lambda self, run: None)

    return type("Hearing", (Callback,), {moment.__name__: of(moment) for moment in moments})()  # type: ignore[no-any-return]


# -- what a callback adds -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_idle_callback_adds_no_call_to_a_step(accumulate: int) -> None:
    bare = calls_a_batch(by_cadenza(accumulate=accumulate))
    assert calls_a_batch(by_cadenza(*(Callback() for _ in range(50)), accumulate=accumulate)) == bare


def test_an_idle_callback_adds_no_call_to_an_evaluation() -> None:
    bare = calls_a_batch(evaluated_by_cadenza())
    assert calls_a_batch(evaluated_by_cadenza(*(Callback() for _ in range(50)))) == bare


@pytest.mark.parametrize("moment", [*PER_BATCH, *PER_STEP], ids=lambda moment: moment.__name__)
def test_a_heard_moment_adds_one_call_for_each_handler(moment: Callable[..., None]) -> None:
    bare = calls_a_batch(by_cadenza())
    assert calls_a_batch(by_cadenza(hearing(moment))) - bare == 1
    assert calls_a_batch(by_cadenza(*(hearing(moment) for _ in range(10)))) - bare == 10


def test_in_a_step_of_four_batches_the_moments_of_a_step_are_called_once() -> None:
    bare = calls_a_batch(by_cadenza(accumulate=4))
    assert calls_a_batch(by_cadenza(hearing(*PER_STEP), accumulate=4)) - bare == len(PER_STEP) / 4
    assert calls_a_batch(by_cadenza(hearing(*PER_BATCH), accumulate=4)) - bare == len(PER_BATCH)


# -- what the loop itself adds ------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
def test_a_step_makes_at_most_a_quarter_more_calls_than_the_loop_written_by_hand(
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
) -> None:
    assert calls_a_batch(by_cadenza(optimizer_of=optimizer_of)) <= 1.25 * calls_a_batch(by_hand(optimizer_of))


def test_so_does_a_step_whose_loss_is_computed_by_supervised() -> None:
    compute_loss = supervised(nn.functional.mse_loss)
    assert calls_a_batch(by_cadenza(compute_loss=compute_loss)) <= 1.25 * calls_a_batch(by_hand())


def test_a_further_batch_of_a_step_makes_at_most_22_calls_more_than_by_hand() -> None:
    assert calls_a_batch(by_cadenza(accumulate=4)) - calls_a_batch(by_hand(accumulate=4)) <= 22


def test_a_batch_of_an_evaluation_makes_at_most_11_calls_more_than_by_hand() -> None:
    assert calls_a_batch(evaluated_by_cadenza()) - calls_a_batch(evaluated_by_hand) <= 11
