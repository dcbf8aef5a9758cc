"""Fan-out: who is called, and what may stand in the list."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Hooks, Run, Trainer
from cadenza.errors import CallbackError
from cadenza.testing import Recorder, tiny_run, tiny_trainer

# -- only what is overridden is called ----------------------------------------------------------------


def test_only_overridden_hooks_are_heard() -> None:
    class One(Callback):
        def on_step_end(self, run: Run) -> None: ...

    assert list(Hooks([One()]).heard) == [Callback.on_step_end]
    assert Hooks([Callback()]).heard == {}


def test_a_hook_inherited_from_a_class_between_is_heard() -> None:
    class Base(Callback):
        def on_step_end(self, run: Run) -> None: ...

    class Derived(Base): ...

    assert list(Hooks([Derived()]).heard) == [Callback.on_step_end]


def test_a_hook_put_on_one_instance_is_heard() -> None:
    calls: list[int] = []
    callback = Callback()
    callback.on_step_end = lambda run: calls.append(run.progress.step)  # type: ignore[method-assign]  # on one instance
    tiny_run(callbacks=[callback], steps=2)
    assert calls == [1, 2]


def calls_in(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, are called in `work`."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


def calls_a_step(callbacks: Callable[[], list[Callback]], steps: int = 40) -> float:
    """Return the calls of one more step: those of a long fit minus those of a short one."""

    def fit(count: int) -> int:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]
        trainer = Trainer(model, optimizer, batches, loss_of, max_epochs=1, callbacks=callbacks(), driver="cpu")
        return calls_in(trainer.fit)

    fit(2)
    return (fit(2 * steps) - fit(steps)) / steps


def calls_a_step_by_hand(steps: int = 40) -> float:
    def fit(count: int) -> int:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]

        def work() -> None:
            model.train()
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return calls_in(work)

    fit(2)
    return (fit(2 * steps) - fit(steps)) / steps


class Heard(Callback):
    """Hears four moments of a step."""

    def on_step_start(self, run: Run) -> None: ...
    def on_batch_start(self, run: Run, batch: Any) -> None: ...
    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None: ...
    def on_step_end(self, run: Run) -> None: ...


def test_an_idle_callback_adds_no_call_to_a_step() -> None:
    assert calls_a_step(lambda: [Callback() for _ in range(50)]) == calls_a_step(list)


def test_a_heard_moment_adds_one_call_for_each_handler() -> None:
    bare = calls_a_step(list)
    assert calls_a_step(lambda: [Heard()]) - bare == 4
    assert calls_a_step(lambda: [Heard() for _ in range(10)]) - bare == 40


def test_a_step_makes_at_most_a_quarter_more_calls_than_the_loop_written_by_hand() -> None:
    assert calls_a_step(list) <= 1.25 * calls_a_step_by_hand()


# -- what may stand in the list -----------------------------------------------------------------------


def test_a_class_instead_of_an_instance_is_an_error() -> None:
    with pytest.raises(CallbackError, match=r"callbacks\[1\] is the class Recorder; expected an instance: Recorder\(\.\.\.\)"):
        tiny_trainer(callbacks=[Recorder(), cast("Any", Recorder)])


@pytest.mark.parametrize("thing", [print, "EarlyStopping", None, lambda run: None])
def test_anything_else_that_is_no_callback_is_an_error(thing: Any) -> None:
    with pytest.raises(CallbackError, match=r"callbacks\[0\] is no callback: expected an instance of Callback, or a function"):
        tiny_trainer(callbacks=[thing])


@pytest.mark.parametrize("callbacks", [Recorder(), None, 3])
def test_callbacks_that_are_no_list_are_an_error(callbacks: Any) -> None:
    with pytest.raises(CallbackError, match=r"callbacks must be a list of callbacks; got .* Write callbacks=\[\.\.\.\]"):
        tiny_trainer(callbacks=callbacks)


def test_the_same_callback_twice_is_an_error() -> None:
    recorder = Recorder()
    with pytest.raises(CallbackError, match=r"callbacks\[2\] stands in the list twice.*Make a second instance"):
        tiny_trainer(callbacks=[recorder, Recorder(), recorder])


def test_two_of_one_class_are_told_apart_by_number_or_by_name() -> None:
    named = Recorder()
    named.name = "mine"
    assert list(Hooks([Recorder(), Recorder(), named, Recorder()]).callbacks) == [
        "Recorder",
        "Recorder#2",
        "mine",
        "Recorder#3",
    ]
