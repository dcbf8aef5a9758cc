"""Fan-out: who is called, and what may stand in the list."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cadenza import Callback, Hooks, Run
from cadenza.errors import CallbackError
from cadenza.testing import Recorder, tiny_run, tiny_trainer


def test_only_hooks_that_a_class_overrides_or_inherits_or_an_instance_has_are_listeners() -> None:
    class Base(Callback):
        def on_step_end(self, run: Run) -> None: ...

    class Derived(Base): ...

    for callback in (Base(), Derived()):
        assert list(Hooks([callback]).by_moment) == [Callback.on_step_end]
    assert Hooks([Callback()]).by_moment == {}
    calls: list[int] = []
    assigned = Callback()
    assigned.on_step_end = lambda run: calls.append(run.progress.step)  # type: ignore[method-assign]  # on one instance
    tiny_run(callbacks=[assigned], steps=2)
    assert calls == [1, 2]


RECORDER = Recorder()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Recorder(), Recorder], r"callbacks\[1\] is the class Recorder; expected an instance: Recorder\(\.\.\.\)"),
        *[
            ([thing], r"callbacks\[0\] is not a callback: expected an instance of Callback, or")
            for thing in (print, "EarlyStopping", None, lambda run: None)
        ],
        *[
            (thing, r"callbacks must be a list of callbacks; got .* Write callbacks=\[\.\.\.\]")
            for thing in (Recorder(), None, 3)
        ],
        ([RECORDER, Recorder(), RECORDER], r"callbacks\[2\] is in the list twice.*Make a second instance"),
    ],
)
def test_what_cannot_stand_in_the_list_is_an_error(callbacks: Any, message: str) -> None:
    with pytest.raises(CallbackError, match=message):
        tiny_trainer(callbacks=callbacks)


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
