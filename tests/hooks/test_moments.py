"""The table of moments, and the mistakes that are found when a class is written."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial, partialmethod, singledispatchmethod, wraps
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch

from cadenza import Callback, Hooks, Run, on
from cadenza.errors import CallbackError, MomentError
from cadenza.hooks import Phase
from cadenza.hooks.moments import moments_of
from cadenza.testing import tiny_run

MOMENTS = """
on_setup on_fit_start on_epoch_start on_fetch_start on_fetch_end on_step_start on_batch_start on_before_backward
on_after_backward on_batch_end on_before_optimizer_step on_after_optimizer_step on_before_zero_grad on_after_zero_grad
on_step_end on_epoch_end on_fit_end on_stop on_exception on_sanity_start on_sanity_end on_eval_start on_eval_batch_start
on_eval_batch_end on_eval_end on_log on_save on_load
"""


def test_the_table_holds_these_moments_in_this_order_and_each_says_when_it_is_called() -> None:
    assert list(moments_of(Callback)) == MOMENTS.split()
    assert all((inspect.getdoc(moment) or "").startswith("Called ") for moment in moments_of(Callback).values())
    assert moments_of(Hooks) == moments_of(Callback)
    assert all(callable(getattr(Hooks(), name)) for name in moments_of(Callback))


SIGNATURE = r"Wrong\.on_step_end has the wrong signature: expected \(self, run\), got "


class Mixin:
    def on_step_ended(self, run: Run) -> None: ...


class Own(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


async def waiting(self: Callback, run: Run) -> None: ...


def yielding(self: Callback, run: Run) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("bases", "name", "hook", "message"),
    [
        ((Callback,), "on_setp_end", None, r"Wrong\.on_setp_end is no moment.*Did you mean 'on_step_end'\?"),
        ((Callback,), "on_zzz", None, r"never be called\..*needs a name without 'on_'.*declares=True"),
        ((Mixin, Callback), "more", None, r"Wrong\.on_step_ended"),
        ((Own,), "on_prun", None, r"Did you mean 'on_prune'\?"),
        ((Callback,), "on_step_end", lambda self: None, rf"{SIGNATURE}\(self\)\."),
        ((Callback,), "on_step_end", lambda self, run, batch: None, rf"{SIGNATURE}\(self, run, batch\)\."),
        ((Callback,), "on_step_end", lambda self, *, run: None, rf"{SIGNATURE}\(self, \*, run\)\."),
        ((Callback,), "on_step_end", waiting, r"async or a generator, so it would never run\. Write a plain function"),
        ((Callback,), "on_step_end", yielding, "async or a generator"),
        *[
            ((Callback,), name, None, rf"{name} is no moment of a run, .*Did you mean '{nearest}'\?")
            for name, nearest in {
                "on_train_batch_end": "on_batch_end",
                "on_train_epoch_end": "on_epoch_end",
                "on_validation_end": "on_eval_end",
                "on_test_epoch_end": "on_eval_end",
                "on_eval_batch_begin": "on_eval_batch_start",
                "on_train_begin": "on_fit_start",
                "on_save_checkpoint": "on_save",
            }.items()
        ],
    ],
)
def test_a_hook_that_could_not_be_called_is_an_error_when_the_class_is_written(
    bases: tuple[type, ...], name: str, hook: Any, message: str
) -> None:
    with pytest.raises(MomentError, match=message):
        type("Wrong", bases, {name: hook or (lambda self, run: None)})


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, running: None,
        lambda self, *arguments: None,
        lambda self, run, extra=3: None,
        staticmethod(lambda run: None),
        classmethod(lambda cls, run: None),
        partial((lambda number, self, run: None) if sys.version_info >= (3, 14) else (lambda number, run: None), 3),
        staticmethod(partial(lambda number, run: None, 3)),
        partialmethod(lambda self, number, run: None, 3),
        singledispatchmethod(lambda self, run: None),
        lru_cache(lambda self, run: None),
        torch.no_grad()(lambda self, run: None),
        wraps(lambda self, run, epoch: None)(lambda self, run: None),
        wraps(lambda self: None)(lambda self, run, *more: None),
    ],
)
def test_hooks_that_can_be_called_are_fine_however_they_are_written(hook: Any) -> None:
    callback = cast("type[Callback]", type("Right", (Callback,), {"on_step_end": hook}))()
    assert len(callback.listeners()) == 1
    tiny_run(callbacks=[callback], steps=1)


def test_a_decorator_that_passes_its_arguments_on_hides_no_mistake() -> None:
    for wrapper in (torch.no_grad(), lambda hook: wraps(hook)(lambda self, *arguments: hook(self, *arguments))):
        with pytest.raises(MomentError, match=r"expected \(self, run\), got \(self, run, logs\).*in the decorator's function"):
            type("Decorated", (Callback,), {"on_epoch_end": wrapper(lambda self, run, logs: None)})


def test_declared_moments_belong_to_the_table_of_the_class_and_of_those_below_it_also_of_two() -> None:
    class Below(Own): ...

    assert list(moments_of(Own)) == list(moments_of(Below)) == [*moments_of(Callback), "on_prune"]
    assert moments_of(Callback).get("on_prune") is None

    class Two(Callback, declares=True):
        def on_two(self, run: Run) -> None: ...

    class Both(Own, Two):
        def on_prune(self, run: Run, ratio: float) -> None: ...
        def on_two(self, run: Run) -> None: ...

    assert {listener.moment for listener in Both().listeners()} == {Own.on_prune, Two.on_two}


# -- habits of other trainers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hook", "answer"),
    [
        ("on_epoch_end", lambda self, epoch, logs=0: None, r"'epoch' would get the run\..*The epoch is run\.progress\.epoch"),
        ("on_epoch_end", lambda self, trainer: None, r"'trainer' would get the run"),
        ("on_step_end", lambda self, state: None, r"'state' would get the run"),
        ("on_step_end", lambda self, args, state, control, **kwargs: None, r"expected \(self, run\), .*run\.stop\(reason\)"),
        ("on_epoch_end", lambda self, trainer, pl_module: None, r"expected \(self, run\), .*the model is run\.model"),
        ("on_batch_end", lambda self, run, outputs, batch: None, r"'outputs' would get the batch"),
        ("on_batch_start", lambda self, run, batch_idx: None, r"'batch_idx' would get the batch"),
        ("on_eval_end", lambda self, run, logs: None, r"'logs' would get the evaluation"),
        ("on_log", lambda self, run, state: None, r"'state' would get the record"),
    ],
)
def test_a_parameter_whose_name_can_only_be_wrong_is_an_error_that_shows_the_right_signature(
    name: str, hook: Any, answer: str
) -> None:
    with pytest.raises(MomentError, match=rf"Habit\.{name} has the wrong signature: {answer}"):
        type("Habit", (Callback,), {name: hook})


def test_the_same_holds_for_functions_that_are_subscribed() -> None:
    with pytest.raises(MomentError, match=r"'epoch' would get the run\. Expected \(run\), got \(epoch\)"):
        on(Callback.on_epoch_end)(lambda epoch: None)

    def keeps(run: Run, state: str = "gets no argument of the moment") -> None: ...

    on(Callback.on_epoch_end)(keeps)


def test_a_name_is_wrong_for_an_argument_of_ours_and_may_be_right_for_another_that_a_class_declares() -> None:
    class Declares(Callback, declares=True):
        def on_tuned(self, run: Run, epoch: int) -> None: ...
        def on_observed(self, run: Run, observation: int, /) -> None: ...

    class Hears(Declares):
        def on_tuned(self, run: Run, epoch: int) -> None: ...
        def on_observed(self, run: Run, state: int) -> None: ...
        def on_save(self, run: Run, state: Any) -> None: ...

    assert len(Hears().listeners()) == 3


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("def hook(self, run): return False", "False"),
        ("def hook(self, run):\n    if run.loss is None: return\n    return 'stop'", "'stop'"),
        ("def hook(self, run): return run.progress.step > 3", "a truth value"),
        ("def hook(self, run): return not run.is_main", "a truth value"),
        ("def hook(self, run): return {'loss': run.loss}", "a new value"),
    ],
)
def test_a_hook_that_is_seen_to_return_a_value_is_an_error(hook: str, value: str) -> None:
    scope: dict[str, Any] = {}
    exec(hook, scope)
    with pytest.raises(
        MomentError, match=rf"it returns {value}, but the return value of a hook is ignored\. .*run\.stop\(reason\)"
    ):
        type("Returns", (Callback,), {"on_step_end": scope["hook"]})


def test_what_may_return_nothing_is_let_pass() -> None:
    class Passes(Callback):
        def on_step_end(self, run: Run) -> None:
            return super().on_step_end(run)

        def on_epoch_end(self, run: Run) -> None:
            return None

    assert len(Passes().listeners()) == 2
    on(Callback.on_step_end)(lambda run: run.progress.step > 3)  # a lambda always returns something


# -- what a class says of itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_fault": "disabled"}, r"Sets\.on_fault must be 'raise' or 'disable'; got 'disabled'\. Did you mean 'disable'\?"),
        ({"on_faults": "disable"}, r"Sets\.on_faults = 'disable' has no effect: .*Did you mean 'on_fault'\?"),
        ({"asks": "no"}, r"Sets\.asks must be True or False; got 'no'"),
        ({"afters": (Callback,)}, r"Sets\.afters = .* has no effect: .*Did you mean 'after'\?"),
        ({"befor": (Callback,)}, r"Sets\.befor = .* has no effect: .*Did you mean 'before'\?"),
        ({"phas": Phase.SAVE}, r"have no 'phas'\. Did you mean 'phase'\?"),
    ],
)
def test_a_setting_that_cannot_be_read_is_an_error_when_the_class_is_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CallbackError, match=message):
        type("Sets", (Callback,), settings)


def test_a_setting_may_be_a_property_or_the_field_of_a_dataclass() -> None:
    @dataclass
    class Fields(Callback):
        on_fault: Literal["raise", "disable"] = field(default="disable", repr=False)
        asks: bool = field(default=False, repr=False)
        after: tuple[type[Callback], ...] = field(default=(), repr=False)

        def on_step_end(self, run: Run) -> None: ...

    class Computed(Callback):
        def __init__(self, safe: bool) -> None:
            self.safe = safe

        @property
        def on_fault(self) -> str:  # type: ignore[override]  # a property is what the test is about
            return "disable" if self.safe else "raise"

        def on_step_end(self, run: Run) -> None:
            raise ValueError("broken")

    assert len(tiny_run(callbacks=[Fields(), Computed(safe=True)], steps=1).faults) == 1


def test_attributes_of_any_kind_are_left_alone_also_if_they_look_like_hooks() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

    class Holds(Callback):
        classes, weights, other = np.array([1, 2]), torch.ones(2), Incomparable()
        on_fault = "raise"
        on_time = 3

        def on_step_end(self, run: Run) -> None: ...

    assert len(Holds().listeners()) == 1


def test_a_callback_may_be_an_abstract_class() -> None:
    class Abstract(Callback, ABC):
        @abstractmethod
        def on_step_end(self, run: Run) -> None: ...

    class Measures(Abstract):
        def on_step_end(self, run: Run) -> None:
            run.log("measured", 3.0)

    assert tiny_run(callbacks=[Measures()], steps=1).history["measured"] == [(1, 3.0)]
