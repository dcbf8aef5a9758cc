"""Who is called and in which order: what may stand in the list, which is the order unless a class says otherwise."""

from __future__ import annotations

import sys
from random import Random
from typing import Any, cast

import pytest
from torch.optim.lr_scheduler import StepLR

from cadenza import Callback, Hooks, Run, callbacks
from cadenza.errors import CallbackError, OrderError
from cadenza.hooks import Phase
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer


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


# -- order -------------------------------------------------------------------------------------------


class Hears(Callback):
    def on_stop(self, run: Run, reason: str) -> None: ...


class First(Hears): ...


class Second(Hears):
    after = (First,)


class Third(Hears):
    after = (Second,)


class Early(Callback):
    before = (First,)


class Free(Callback): ...


def order(*callbacks: Callback) -> list[str]:
    return list(Hooks(callbacks).callbacks)


class Special(First): ...


class Selfish(Callback): ...


Selfish.after = cast("tuple[type[Callback], ...]", (Selfish,))


class Saves(Hears):
    phase = Phase.SAVE


class SpecialSaves(Saves): ...


class AfterSaving(Hears):
    after = (Phase.SAVE,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param([Free(), First(), Free()], "Free First Free#2", id="the order of the list"),
        pytest.param([Third(), Second(), First(), Early()], "Early First Second Third", id="after and before"),
        pytest.param([Free(), Second(), Free(), First(), Free()], "Free Free#2 First Second Free#3", id="a stable sort"),
        pytest.param([Second(), Free()], "Second Free", id="a relation to a missing callback"),
        pytest.param([Second(), Special()], "Special Second", id="a relation to a subclass"),
        pytest.param([Selfish()], "Selfish", id="a circle of one class"),
        pytest.param(
            [AfterSaving(), Free(), SpecialSaves(), Saves()],
            "Free SpecialSaves Saves AfterSaving",
            id="a phase that is declared or inherited",
        ),
        pytest.param(
            [callbacks.BestWeights("eval/loss", "min"), Saves()], "Saves BestWeights", id="the phase of a shipped callback"
        ),
    ],
)
def test_the_order_is_that_of_the_list_unless_a_class_says_otherwise(given: list[Callback], expected: str) -> None:
    assert order(*given) == expected.split()


def test_an_instance_may_have_relations_of_its_own_and_the_plan_tells_why_the_order_is_not_that_of_the_list() -> None:
    mine = Free()
    mine.after = (Third,)
    assert order(mine, Third()) == ["Third", "Free"]
    assert "order: Second comes after First" in str(tiny_trainer(callbacks=[Second(), First()]).plan())


def test_moments_are_called_in_that_order() -> None:
    calls: list[str] = []

    class Calls(Callback):
        def on_step_end(self, run: Run) -> None:
            calls.append(type(self).__name__)

    class A(Calls): ...

    class B(Calls):
        before = (A,)

    tiny_trainer(callbacks=[A(), B()], steps=1).fit()
    assert calls == ["B", "A"]


class Circle(Hears):
    after = (Third,)
    before = (First,)


class Left(Hears): ...


class Right(Hears):
    after = (Left,)


Left.after = (Right,)


class SavesLast(Saves):
    after = (AfterSaving,)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            [First(), Second(), Third(), Circle()],
            "contradicts itself.*First must come after Circle.*Circle must come after Third.*Remove one of these",
        ),
        ([Left(), Right()], "Left must come after Right, and Right must come after Left"),
        ([SavesLast(), AfterSaving()], "SavesLast must come after AfterSaving, and AfterSaving must come after SavesLast"),
    ],
)
def test_a_contradiction_is_an_error_at_construction_that_names_both(given: list[Callback], told: str) -> None:
    with pytest.raises(OrderError, match=f"(?s){told}"):
        tiny_trainer(callbacks=given)


@pytest.mark.parametrize("wrong", [First, [First], ("First",), (First(),), Phase.SAVE])
def test_relations_that_are_no_tuple_of_classes_and_phases_are_an_error_when_the_class_is_written(wrong: Any) -> None:
    with pytest.raises(
        OrderError, match=r"Wrong\.after must be a tuple of classes and phases, such as \(Evaluate, Phase\.SAVE\)"
    ):
        type("Wrong", (Callback,), {"after": wrong})


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("before", 1.5, r"callbacks\[1\]\.before must be a tuple of classes and phases, .*; got 1\.5"),
        ("after", [First], r"callbacks\[1\]\.after must be a tuple"),
        ("name", 3, r"callbacks\[1\]\.name must be a string, or None for the name of the class; got 3"),
        ("on_fault", "disabled", r"callbacks\[1\]\.on_fault must be 'raise' or 'disable'; got 'disabled'"),
    ],
)
def test_wrong_settings_of_one_callback_are_an_error_that_names_it(name: str, wrong: Any, said: str) -> None:
    second = Second()
    setattr(second, name, wrong)
    with pytest.raises(CallbackError, match=said):
        tiny_trainer(callbacks=[First(), second])


# -- phases -------------------------------------------------------------------------------------------


SHIPPED: list[BaseCallback] = [
    callbacks.FindBatchSize(lambda size: tiny_loader(), max_size=2),
    callbacks.Limit(train=2),
    callbacks.FindLearningRate(),
    callbacks.LearningRate(lambda optimizer: StepLR(optimizer, 1)),
    callbacks.StopOnNonFinite(),
    callbacks.ClipGradients(max_norm=1.0),
    callbacks.Warmup("2 steps"),
    callbacks.Checkpoint(),
    callbacks.SlurmRequeue(),
    callbacks.BestWeights("eval/loss", "min"),
    callbacks.EarlyStopping("eval/loss", mode="min", restore_best=True),
    callbacks.Evaluate(tiny_loader(1)),
    callbacks.Ema(),
    callbacks.LogTraining(),
    callbacks.Summary(),
]
EARLIER = {
    "FindBatchSize": ["Limit", "LearningRate"],
    "Limit": ["LearningRate"],
    "FindLearningRate": ["LearningRate"],
    "StopOnNonFinite": ["LearningRate", "ClipGradients"],
    "Warmup": ["LearningRate", "Checkpoint"],
    "SlurmRequeue": ["Checkpoint"],
    "Checkpoint": ["BestWeights", "EarlyStopping"],
}


def expected(names: list[str]) -> list[str]:
    """Return `names` in the stable order that EARLIER asks for."""
    left, sorted_names = list(names), []
    while left:
        ready = next(name for name in left if not any(name in EARLIER.get(other, ()) for other in left))
        left.remove(ready)
        sorted_names.append(ready)
    return sorted_names


def test_the_shipped_callbacks_have_these_relations_and_no_others() -> None:
    random = Random(0)
    for _ in range(200):
        given = random.sample(SHIPPED, random.randint(2, len(SHIPPED)))
        assert order(*cast("list[Callback]", given)) == expected([type(one).__name__ for one in given])
