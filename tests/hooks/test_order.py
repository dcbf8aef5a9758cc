"""The order of callbacks: that of the list, unless a class says otherwise."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cadenza import Callback, Hooks, Run
from cadenza.errors import OrderError
from cadenza.testing import tiny_trainer


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


def test_the_sort_is_stable_so_that_nobody_moves_without_need() -> None:
    assert order(Free(), Second(), Free(), First(), Free()) == ["Free", "Free#2", "First", "Second", "Free#3"]


def test_a_relation_to_somebody_who_is_not_there_changes_nothing() -> None:
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


@pytest.mark.parametrize("wrong", [First, [First], ("First",), (First(),)])
def test_relations_that_are_no_tuple_of_classes_are_an_error_when_the_class_is_written(wrong: Any) -> None:
    with pytest.raises(OrderError, match=r"Wrong\.after must be a tuple of classes, such as \(Evaluate,\); got"):
        type("Wrong", (Callback,), {"after": wrong})


def test_the_plan_tells_why_the_order_is_not_that_of_the_list() -> None:
    assert "order: Second comes after First" in str(tiny_trainer(callbacks=[Second(), First()]).plan())


def test_a_circle_of_one_class_is_no_circle_for_one_instance() -> None:
    class Selfish(Callback): ...

    Selfish.after = cast("tuple[type[Callback], ...]", (Selfish,))
    assert order(Selfish()) == ["Selfish"]
