"""The table of moments, the mistakes that are found when a class is written, and functions on a moment."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial, partialmethod, singledispatchmethod, wraps
from typing import Any, Literal, cast

import numpy
import numpy as np
import pytest
import torch

from cadenza import Callback, Hooks, Run, on
from cadenza.callbacks import Checkpoint, DeviceStats, Ema, Evaluate, Histograms, LogTraining
from cadenza.errors import CallbackError, MomentError, ScheduleError
from cadenza.hooks import Phase
from cadenza.hooks.moments import moments_of
from cadenza.hooks.schedule import At
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer

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


CAN_ONLY_BE_WRONG: list[tuple[str, Any, str]] = [  # names of parameters
    ("on_epoch_end", lambda self, epoch, logs=0: None, r"'epoch' would get the run\..*The epoch is run\.progress\.epoch"),
    ("on_epoch_end", lambda self, run, epoch=None, logs=None: None, r"'epoch' would always be None\. Expected \(self, run\)"),
    ("on_epoch_end", lambda self, trainer: None, r"'trainer' would get the run"),
    ("on_step_end", lambda self, state: None, r"'state' would get the run"),
    ("on_step_end", lambda self, args, state, control, **kwargs: None, r"expected \(self, run\), .*run\.stop\(reason\)"),
    ("on_epoch_end", lambda self, trainer, pl_module: None, r"expected \(self, run\), .*the model is run\.model"),
    ("on_batch_end", lambda self, run, outputs, batch: None, r"'outputs' would get the batch"),
    ("on_batch_start", lambda self, run, batch_idx: None, r"'batch_idx' would get the batch"),
    ("on_eval_end", lambda self, run, logs: None, r"'logs' would get the evaluation"),
    ("on_log", lambda self, run, state: None, r"'state' would get the record"),
]


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
        *[
            ((Callback,), name, hook, rf"Wrong\.{name} has the wrong signature: {answer}")
            for name, hook, answer in CAN_ONLY_BE_WRONG
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


# -- functions on a moment: filters ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "filters", "expected"),
    [
        (Callback.on_step_end, {"every": 2}, [2, 4, 6]),
        (Callback.on_step_start, {"every": 2}, [1, 3, 5]),  # the step under way counts
        (Callback.on_before_optimizer_step, {"every": 3}, [2, 5]),
        (Callback.on_batch_end, {"every": 4}, [1, 3, 5]),  # batches
        (Callback.on_epoch_end, {"every": 2}, [6]),
        (Callback.on_epoch_start, {"every": 2}, [3]),
        (Callback.on_fit_start, {"every": 2}, []),
        (Callback.on_step_start, {"every": "2 steps"}, [1, 3, 5]),
        (Callback.on_step_end, {"every": "1 epoch"}, [4]),  # the first step after an epoch is complete
        (Callback.on_epoch_end, {"every": "2 steps"}, [3, 6]),
        (Callback.on_step_end, {"every": numpy.int64(3)}, [3, 6]),
        (Callback.on_step_end, {"at": "1 epoch"}, [4]),
        (Callback.on_step_end, {"at": At("1 epoch")}, [4]),
        (Callback.on_epoch_end, {"at": "50%"}, [3]),
        (Callback.on_step_end, {"at": 3}, [3]),
        (Callback.on_step_start, {"at": 3}, [2]),
        (Callback.on_step_end, {"when": lambda run: run.progress.step in (2, 5)}, [2, 5]),
    ],
)
def test_a_filter_counts_what_its_moment_counts_or_the_unit_that_it_names(
    moment: Any, filters: dict[str, Any], expected: list[int]
) -> None:
    """In 2 epochs of 6 batches, two a step."""
    steps: list[int] = []
    look = on(moment, **filters)(lambda run, *_: steps.append(run.progress.step))
    tiny_run(callbacks=[look], epochs=2, batches=6, accumulate=2)
    assert steps == expected


def test_a_filter_is_fresh_in_each_run_and_counts_how_often_a_moment_without_a_counter_fired() -> None:
    steps: list[int] = []
    trainer = tiny_trainer(callbacks=[on(Callback.on_step_end, at=2)(lambda run: steps.append(run.progress.step))])
    trainer.fit()
    trainer.fit()
    assert steps == [2, 2]
    steps.clear()
    third = on(Callback.on_eval_end, every=3)(lambda run, _: steps.append(run.progress.step))
    tiny_run(callbacks=[Evaluate(tiny_loader(), every="2 steps"), third], steps=20, batches=20)
    assert steps == [6, 12, 18]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "500", "steps", ["1 epoch"]])
def test_a_wrong_every_is_the_same_error_everywhere(value: Any) -> None:
    errors = []
    for make in (partial(on, Callback.on_step_end), LogTraining, Ema, Histograms, DeviceStats, Checkpoint):
        if value is None and isinstance(make, partial):  # on(moment, every=None) calls the function each time
            continue
        with pytest.raises(ScheduleError, match=r'is no schedule.* Use one of: 500 \(steps\), "500 steps"') as caught:
            make(every=value)
        errors.append(str(caught.value))
    assert len(set(errors)) == 1


# -- functions as callbacks ---------------------------------------------------------------------------


async def later(run: Run) -> None: ...


def generator(run: Run) -> Iterator[int]:
    yield 1


ONE_OF, NO_POINT = "one of every=, at= and when=; got ", "is no schedule: (a number must be whole|expected a number and a unit)"
NEVER_RUNS = r"is async or a generator, so it would never run\. Write a plain function \(run\)"


@pytest.mark.parametrize(
    ("subscribe", "error", "message"),
    [
        *[
            (lambda moment=moment: on(moment), MomentError, r"expected a moment, such as Callback\.on_step_end; got")
            for moment in ("on_step_end", print, None, Recorder.listeners)
        ],
        (
            lambda: on(Callback.on_step_end)(cast("Any", looking)),
            MomentError,
            r"looking cannot be called at on_step_end: expected \(run\), got \(run.*batch.*\)",
        ),
        (lambda: on(Callback.on_step_end)(later), MomentError, NEVER_RUNS),
        (lambda: on(Callback.on_step_end)(generator), MomentError, NEVER_RUNS),
        (lambda: on(Callback.on_step_end)(cast("Any", 3)), MomentError, "expected a function for on_step_end; got 3"),
        (lambda: on(Callback.on_step_end, when=cast("Any", 5)), TypeError, r"When needs a function \(run\) -> bool; got 5"),
        *[
            (lambda both=both: on(Callback.on_step_end, **both), ValueError, rf"{ONE_OF}{' and '.join(both)}\. Keep one")
            for both in ({"every": 2, "at": 3}, {"every": 2, "when": bool}, {"every": 1, "at": 1, "when": bool})
        ],
        *[
            (lambda at=at: on(Callback.on_step_end, at=cast("Any", at)), ScheduleError, NO_POINT)
            for at in (0, -1, 1.5, True, "3")
        ],
    ],
)
def test_what_cannot_be_subscribed_is_an_error_at_once(
    subscribe: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        subscribe()


def looking(run: Run, batch: Any) -> None: ...


def test_functions_builtins_and_bound_methods_can_be_subscribed_and_the_repr_shows_the_schedule() -> None:
    double = on(Callback.on_step_end, every=3)(lambda run: cast("Any", run) * 2)
    assert double(21) == 42
    assert repr(double) == "<lambda>: on_step_end (every 3 steps)"
    batches: list[Any] = []

    class Box:
        def put(self, run: Run, batch: Any) -> None:
            batches.append(batch)

    tiny_run(callbacks=[on(Callback.on_batch_start)(Box().put)], batches=2)
    assert len(batches) == 2


# -- a project's own moments --------------------------------------------------------------------------


def test_a_declared_moment_calls_its_listeners() -> None:
    heard: list[tuple[str, float]] = []

    class Pruner(Callback):
        def on_step_end(self, run: Run) -> None:
            run.fire(Own.on_prune, 0.1 * run.progress.step)

    class Hearing(Own):
        def on_prune(self, run: Run, ratio: float) -> None:
            heard.append(("class", ratio))

        def on_fit_end(self, run: Run) -> None:
            run.fire(Own.on_prune, ratio=0.5)  # arguments may be named

    function = on(Own.on_prune, when=lambda run: run.progress.step > 1)(lambda run, ratio: heard.append(("f", ratio)))
    tiny_run(callbacks=[Pruner(), Hearing(), function], steps=2)
    assert heard == [("class", 0.1), ("class", 0.2), ("f", 0.2), ("class", 0.5), ("f", 0.5)]


def test_firing_with_the_wrong_arguments_or_what_is_not_declared_is_an_error() -> None:
    fire = cast("Any", tiny_run(steps=1).fire)
    with pytest.raises(MomentError, match=r"Own\.on_prune was fired with the wrong arguments: missing .*'ratio'"):
        fire(Own.on_prune)
    with pytest.raises(MomentError, match=r"unexpected keyword argument 'rate'"):
        fire(Own.on_prune, 0.1, rate=0.1)
    with pytest.raises(MomentError, match=r"Declare a moment of your own in a class with declares=True"):
        fire(print)


def test_an_error_in_ones_own_moment_is_named_as_any_other() -> None:
    class Bad(Own):
        def on_prune(self, run: Run, ratio: float) -> None:
            raise ValueError("broken")

        def on_step_end(self, run: Run) -> None:
            run.fire(Own.on_prune, 0.3)

    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Bad()])
    assert caught.value.__notes__ == ["raised in Bad.on_prune (callback 1 of 1) at epoch 1, step 1, batch 1"]
