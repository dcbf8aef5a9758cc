"""Fan-out: who is called, and what may stand in the list."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from cadenza import Callback, Hooks, Run
from cadenza.errors import CallbackError
from cadenza.testing import Recorder, tiny_run, tiny_trainer

# -- only what is overridden is called ----------------------------------------------------------------


def test_only_overridden_hooks_are_listeners() -> None:
    class One(Callback):
        def on_step_end(self, run: Run) -> None: ...

    assert list(Hooks([One()]).by_moment) == [Callback.on_step_end]
    assert Hooks([Callback()]).by_moment == {}


def test_an_inherited_hook_is_a_listener() -> None:
    class Base(Callback):
        def on_step_end(self, run: Run) -> None: ...

    class Derived(Base): ...

    assert list(Hooks([Derived()]).by_moment) == [Callback.on_step_end]


def test_a_hook_assigned_to_an_instance_is_a_listener() -> None:
    calls: list[int] = []
    callback = Callback()
    callback.on_step_end = lambda run: calls.append(run.progress.step)  # type: ignore[method-assign]  # on one instance
    tiny_run(callbacks=[callback], steps=2)
    assert calls == [1, 2]


# -- what may stand in the list -----------------------------------------------------------------------


def test_a_class_instead_of_an_instance_is_an_error() -> None:
    with pytest.raises(CallbackError, match=r"callbacks\[1\] is the class Recorder; expected an instance: Recorder\(\.\.\.\)"):
        tiny_trainer(callbacks=[Recorder(), cast("Any", Recorder)])


@pytest.mark.parametrize("thing", [print, "EarlyStopping", None, lambda run: None])
def test_anything_else_that_is_no_callback_is_an_error(thing: Any) -> None:
    with pytest.raises(CallbackError, match=r"callbacks\[0\] is not a callback: expected an instance of Callback, or"):
        tiny_trainer(callbacks=[thing])


@pytest.mark.parametrize("callbacks", [Recorder(), None, 3])
def test_callbacks_that_are_no_list_are_an_error(callbacks: Any) -> None:
    with pytest.raises(CallbackError, match=r"callbacks must be a list of callbacks; got .* Write callbacks=\[\.\.\.\]"):
        tiny_trainer(callbacks=callbacks)


def test_the_same_callback_twice_is_an_error() -> None:
    recorder = Recorder()
    with pytest.raises(CallbackError, match=r"callbacks\[2\] is in the list twice.*Make a second instance"):
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


def test_twice_as_many_callbacks_of_one_class_take_twice_the_work() -> None:
    def lines_run(count: int) -> int:
        callbacks, lines = [Recorder() for _ in range(count)], 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            Hooks(callbacks)
        finally:
            sys.settrace(before)
        return lines

    lines_run(1)
    assert lines_run(200) < 2.1 * lines_run(100)
