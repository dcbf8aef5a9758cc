"""Functions on a moment, not always called: every, at, when; and a project's own moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy
import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, DeviceStats, Ema, Evaluate, Histograms, LogTraining
from cadenza.errors import MomentError, ScheduleError
from cadenza.hooks.schedule import At
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


# -- filters ------------------------------------------------------------------------------------------


def fired_at(moment: Callable[..., None], **filters: Any) -> list[int]:
    """Return at how many complete steps a filtered function on `moment` was called: 2 epochs of 6 batches, two a step."""
    steps: list[int] = []
    look = on(moment, **filters)(lambda run, *_: steps.append(run.progress.step))
    tiny_run(callbacks=[look], epochs=2, batches=6, accumulate=2)
    return steps


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
    assert fired_at(moment, **filters) == expected


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


@pytest.mark.parametrize("filters", [{"every": 2, "at": 3}, {"every": 2, "when": bool}, {"every": 1, "at": 1, "when": bool}])
def test_two_filters_are_an_error_when_written(filters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"one of every=, at= and when=; got {' and '.join(filters)}\. Keep one"):
        on(Callback.on_step_end, **filters)


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


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_an_at_that_is_no_point_is_an_error(value: Any) -> None:
    with pytest.raises(ScheduleError, match=r"is no schedule: (a number must be whole|expected a number and a unit)"):
        on(Callback.on_step_end, at=value)


# -- functions as callbacks ---------------------------------------------------------------------------


async def later(run: Run) -> None: ...


def generator(run: Run) -> Iterator[int]:
    yield 1


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
            run.fire(PruneMoments.on_prune, 0.1 * run.progress.step)

    class Hearing(PruneMoments):
        def on_prune(self, run: Run, ratio: float) -> None:
            heard.append(("class", ratio))

        def on_fit_end(self, run: Run) -> None:
            run.fire(PruneMoments.on_prune, ratio=0.5)  # arguments may be named

    function = on(PruneMoments.on_prune, when=lambda run: run.progress.step > 1)(lambda run, ratio: heard.append(("f", ratio)))
    tiny_run(callbacks=[Pruner(), Hearing(), function], steps=2)
    assert heard == [("class", 0.1), ("class", 0.2), ("f", 0.2), ("class", 0.5), ("f", 0.5)]


def test_firing_with_the_wrong_arguments_or_what_is_not_declared_is_an_error() -> None:
    fire = cast("Any", tiny_run(steps=1).fire)
    with pytest.raises(MomentError, match=r"PruneMoments\.on_prune was fired with the wrong arguments: missing .*'ratio'"):
        fire(PruneMoments.on_prune)
    with pytest.raises(MomentError, match=r"unexpected keyword argument 'rate'"):
        fire(PruneMoments.on_prune, 0.1, rate=0.1)
    with pytest.raises(MomentError, match=r"Declare a moment of your own in a class with declares=True"):
        fire(print)


def test_an_error_in_ones_own_moment_is_named_as_any_other() -> None:
    class Bad(PruneMoments):
        def on_prune(self, run: Run, ratio: float) -> None:
            raise ValueError("broken")

        def on_step_end(self, run: Run) -> None:
            run.fire(PruneMoments.on_prune, 0.3)

    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Bad()])
    assert caught.value.__notes__ == ["raised in Bad.on_prune (callback 1 of 1) at epoch 0, step 1, batch 1"]
