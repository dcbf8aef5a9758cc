"""The table of moments, and the mistakes that are found when a class is written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import pytest

from cadenza import Callback, Hooks, Run
from cadenza.errors import MomentError
from cadenza.moments import moments_of

MOMENTS = """
on_setup on_fit_start on_epoch_start on_fetch_start on_fetch_end on_step_start on_batch_start on_before_backward
on_after_backward on_batch_end on_before_optimizer_step on_after_optimizer_step on_before_zero_grad on_after_zero_grad
on_step_end on_epoch_end on_fit_end on_stop on_exception on_sanity_start on_sanity_end on_eval_start on_eval_batch_start
on_eval_batch_end on_eval_end on_log on_save on_load
"""


def test_the_table_holds_these_moments_in_this_order() -> None:
    assert list(moments_of(Callback)) == MOMENTS.split()


@pytest.mark.parametrize("moment", moments_of(Callback).values(), ids=moments_of(Callback))
def test_every_moment_says_when_it_is_called(moment: object) -> None:
    assert (inspect.getdoc(moment) or "").startswith("Called ")


def test_hooks_have_every_moment_of_the_table() -> None:
    assert moments_of(Hooks) == moments_of(Callback)
    assert all(callable(getattr(Hooks(), name)) for name in moments_of(Callback))


def test_a_misspelled_hook_is_an_error_when_the_class_is_written() -> None:
    with pytest.raises(MomentError, match=r"Misspelled\.on_setp_end is no moment.*Did you mean 'on_step_end'\?"):

        class Misspelled(Callback):
            def on_setp_end(self, run: Run) -> None: ...


def test_a_hook_like_nothing_we_know_says_how_to_declare_it() -> None:
    with pytest.raises(MomentError, match=r"never be called\..*needs a name without 'on_'.*declares=True"):

        class Unknown(Callback):
            def on_zzz(self, run: Run) -> None: ...


def test_a_misspelled_hook_of_a_mixin_is_found_too() -> None:
    class Mixin:
        def on_step_ended(self, run: Run) -> None: ...

    with pytest.raises(MomentError, match=r"Mixed\.on_step_ended"):

        class Mixed(Mixin, Callback): ...


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (lambda self: None, r"\(self\)"),
        (lambda self, run, batch: None, r"\(self, run, batch\)"),
        (lambda self, *, run: None, r"\(self, \*, run\)"),
    ],
)
def test_a_wrong_signature_is_an_error_when_the_class_is_written(hook: Any, got: str) -> None:
    with pytest.raises(MomentError, match=rf"Wrong\.on_step_end has the wrong signature: expected \(self, run\), got {got}\."):
        type("Wrong", (Callback,), {"on_step_end": hook})


def test_an_async_hook_is_an_error() -> None:
    with pytest.raises(MomentError, match=r"async or a generator, and would never run\. Write a plain function"):

        class Later(Callback):
            async def on_step_end(self, run: Run) -> None: ...  # type: ignore[override]  # this is what the test is about


def test_a_hook_that_yields_is_an_error() -> None:
    with pytest.raises(MomentError, match="async or a generator"):

        class Yielding(Callback):
            def on_step_end(self, run: Run) -> Iterator[int]:  # type: ignore[override]  # this is what the test is about
                yield 1


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, running: None,
        lambda self, *arguments: None,
        lambda self, run, extra=3: None,
        staticmethod(lambda run: None),
        classmethod(lambda cls, run: None),
    ],
)
def test_hooks_that_can_be_called_are_fine_however_they_are_written(hook: Any) -> None:
    callback = cast("type[Callback]", type("Right", (Callback,), {"on_step_end": hook}))()
    assert len(callback.listeners()) == 1


def test_names_that_only_look_like_hooks_but_are_no_functions_are_left_alone() -> None:
    class Settings(Callback):
        on_fault = "raise"
        on_time = 3

    assert Settings().listeners() == []


def test_declared_moments_belong_to_the_table_of_the_class_and_of_those_below_it() -> None:
    class Own(Callback, declares=True):
        def on_prune(self, run: Run, ratio: float) -> None:
            """Called after the smallest weights were set to zero."""

    class Below(Own): ...

    assert list(moments_of(Own)) == list(moments_of(Below)) == [*moments_of(Callback), "on_prune"]
    assert moments_of(Callback).get("on_prune") is None
    with pytest.raises(MomentError, match=r"Did you mean 'on_prune'\?"):

        class Misspelled(Own):
            def on_prun(self, run: Run, ratio: float) -> None: ...


def test_a_class_may_hear_the_moments_of_two_declarations() -> None:
    class One(Callback, declares=True):
        def on_one(self, run: Run) -> None: ...

    class Two(Callback, declares=True):
        def on_two(self, run: Run) -> None: ...

    class Both(One, Two):
        def on_one(self, run: Run) -> None: ...
        def on_two(self, run: Run) -> None: ...

    assert {listener.moment for listener in Both().listeners()} == {One.on_one, Two.on_two}
