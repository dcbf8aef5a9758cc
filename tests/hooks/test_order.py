"""The order of callbacks: that of the list, unless a class says otherwise."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
from torch.optim.lr_scheduler import StepLR

from cadenza import Callback, Hooks, Run, callbacks
from cadenza.errors import CallbackError, OrderError
from cadenza.hooks import Phase
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import tiny_loader, tiny_trainer


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


def test_without_relations_it_is_the_order_of_the_list() -> None:
    assert order(Free(), First(), Free()) == ["Free", "First", "Free#2"]


def test_after_and_before_are_met() -> None:
    assert order(Third(), Second(), First(), Early()) == ["Early", "First", "Second", "Third"]


def test_the_sort_is_stable() -> None:
    assert order(Free(), Second(), Free(), First(), Free()) == ["Free", "Free#2", "First", "Second", "Free#3"]


def test_a_relation_to_a_missing_callback_has_no_effect() -> None:
    assert order(Second(), Free()) == ["Second", "Free"]


def test_a_relation_holds_for_subclasses_too() -> None:
    class Special(First): ...

    assert order(Second(), Special()) == ["Special", "Second"]


def test_an_instance_may_have_relations_of_its_own() -> None:
    mine = Free()
    mine.after = (Third,)
    assert order(mine, Third()) == ["Third", "Free"]


def test_moments_are_called_in_that_order() -> None:
    calls: list[str] = []

    class A(Callback):
        def on_step_end(self, run: Run) -> None:
            calls.append("A")

    class B(Callback):
        before = (A,)

        def on_step_end(self, run: Run) -> None:
            calls.append("B")

    tiny_trainer(callbacks=[A(), B()], steps=1).fit()
    assert calls == ["B", "A"]


def test_a_contradiction_is_an_error_at_construction_that_names_both() -> None:
    class Circle(Hears):
        after = (Third,)
        before = (First,)

    with pytest.raises(OrderError, match="contradicts itself") as caught:
        tiny_trainer(callbacks=[First(), Second(), Third(), Circle()])
    message = str(caught.value)
    assert "Circle must come after Third" in message
    assert "First must come after Circle" in message
    assert "Remove one of these" in message


def test_two_that_each_want_to_be_after_the_other_are_both_named() -> None:
    class Left(Callback): ...

    class Right(Callback):
        after = (Left,)

    Left.after = (Right,)
    with pytest.raises(OrderError, match=r"Left must come after Right, and Right must come after Left"):
        Hooks([Left(), Right()])


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
    ],
)
def test_wrong_settings_of_one_callback_are_an_error_that_names_it(name: str, wrong: Any, said: str) -> None:
    second = Second()
    setattr(second, name, wrong)
    with pytest.raises(CallbackError, match=said):
        tiny_trainer(callbacks=[First(), second])


def test_the_plan_tells_why_the_order_is_not_that_of_the_list() -> None:
    assert "order: Second comes after First" in str(tiny_trainer(callbacks=[Second(), First()]).plan())


def test_a_circle_of_one_class_is_no_circle_for_one_instance() -> None:
    class Selfish(Callback): ...

    Selfish.after = cast("tuple[type[Callback], ...]", (Selfish,))
    assert order(Selfish()) == ["Selfish"]


# -- phases -------------------------------------------------------------------------------------------


class Saves(Hears):
    phase = Phase.SAVE


class AfterSaving(Hears):
    after = (Phase.SAVE,)


def test_a_phase_stands_for_all_callbacks_that_declare_it_or_inherit_it() -> None:
    class Special(Saves): ...

    assert order(AfterSaving(), Free(), Special(), Saves()) == ["Free", "Special", "Saves", "AfterSaving"]


def test_a_callback_of_the_users_own_takes_the_phase_of_a_shipped_one() -> None:
    assert order(callbacks.BestWeights("eval/loss", "min"), Saves()) == ["Saves", "BestWeights"]


def test_a_contradiction_of_phases_names_both_callbacks() -> None:
    class SavesLast(Saves):
        after = (AfterSaving,)

    with pytest.raises(OrderError, match="SavesLast must come after AfterSaving, and AfterSaving must come after SavesLast"):
        tiny_trainer(callbacks=[SavesLast(), AfterSaving()])


def test_a_phase_under_a_misspelled_name_is_an_error_when_the_class_is_written() -> None:
    with pytest.raises(CallbackError, match=r"have no 'phas'\. Did you mean 'phase'\?"):
        type("Wrong", (Callback,), {"phas": Phase.SAVE})


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
EARLIER = [
    tuple(pair.split(" < "))
    for pair in """
FindBatchSize < Limit
FindBatchSize < LearningRate
Limit < LearningRate
FindLearningRate < LearningRate
StopOnNonFinite < LearningRate
StopOnNonFinite < ClipGradients
Warmup < LearningRate
Warmup < Checkpoint
SlurmRequeue < Checkpoint
Checkpoint < BestWeights
Checkpoint < EarlyStopping
""".strip().splitlines()
]


def expected(names: list[str]) -> list[str]:
    """Return `names` in the stable order that EARLIER asks for."""
    left, sorted_names = list(names), []
    while left:
        ready = next(name for name in left if not any((other, name) in EARLIER for other in left))
        left.remove(ready)
        sorted_names.append(ready)
    return sorted_names


def test_the_shipped_callbacks_have_these_relations_and_no_others() -> None:
    random = Random(0)
    for _ in range(200):
        given = random.sample(SHIPPED, random.randint(2, len(SHIPPED)))
        assert order(*cast("list[Callback]", given)) == expected([type(one).__name__ for one in given])
