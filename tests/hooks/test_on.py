"""Functions on a moment, not always called: every, at, when; and a project's own moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy
import pytest

from cadenza import Callback, Counters, Progress, Run, on
from cadenza.callbacks import Checkpoint, DeviceStats, Ema, Evaluate, Histograms, LogTraining
from cadenza.errors import MomentError, ScheduleError
from cadenza.hooks.schedule import At, Every, Schedule
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


def test_every_on_a_step_moment_counts_steps() -> None:
    assert fired_at(Callback.on_step_end, every=2) == [2, 4, 6]


def test_every_on_a_moment_before_the_end_counts_the_step_under_way() -> None:
    assert fired_at(Callback.on_step_start, every=2) == [1, 3, 5]
    assert fired_at(Callback.on_before_optimizer_step, every=3) == [2, 5]


def test_every_on_a_batch_moment_counts_batches() -> None:
    assert fired_at(Callback.on_batch_end, every=4) == [1, 3, 5]


def test_every_on_an_epoch_moment_counts_epochs() -> None:
    assert fired_at(Callback.on_epoch_end, every=2) == [6]
    assert fired_at(Callback.on_epoch_start, every=2) == [3]


def test_at_takes_a_point_of_the_run() -> None:
    assert fired_at(Callback.on_step_end, at="1 epoch") == fired_at(Callback.on_step_end, at=At("1 epoch")) == [4]
    assert fired_at(Callback.on_epoch_end, at="50%") == [3]


def test_at_fires_once() -> None:
    assert fired_at(Callback.on_step_end, at=3) == [3]
    assert fired_at(Callback.on_step_start, at=3) == [2]


def test_when_calls_a_function_of_the_run() -> None:
    assert fired_at(Callback.on_step_end, when=lambda run: run.progress.step in (2, 5)) == [2, 5]


@pytest.mark.parametrize(
    ("filter", "expected"), [(Every("3 steps"), [6, 9]), (At("6 steps"), [6]), (At("5 steps"), []), (At("2 steps"), [])]
)
def test_a_resumed_run_fires_where_the_whole_one_would_have(filter: Schedule, expected: list[int]) -> None:
    progress = Progress(max_steps=10)
    progress.begin(Counters(step=5), batches_per_epoch=None)

    class Resumed:
        """All of a run that a filter looks at."""

    resumed = cast("Run", Resumed())
    resumed.progress = progress
    due, fired = filter.timer().due, []
    while not progress.finished:
        progress.finish_step()
        if due(resumed):
            fired.append(progress.step)
    assert fired == expected


def test_a_filter_is_fresh_in_each_run() -> None:
    steps: list[int] = []
    trainer = tiny_trainer(callbacks=[on(Callback.on_step_end, at=2)(lambda run: steps.append(run.progress.step))])
    trainer.fit()
    trainer.fit()
    assert steps == [2, 2]


@pytest.mark.parametrize("filters", [{"every": 2, "at": 3}, {"every": 2, "when": bool}, {"every": 1, "at": 1, "when": bool}])
def test_two_filters_are_an_error_when_written(filters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"one of every=, at= and when=; got {' and '.join(filters)}\. Keep one"):
        on(Callback.on_step_end, **filters)


@pytest.mark.parametrize(
    ("moment", "every", "expected"),
    [
        (Callback.on_step_end, "2 steps", [2, 4, 6]),
        (Callback.on_step_start, "2 steps", [1, 3, 5]),  # as every=2: the step under way counts
        (Callback.on_step_end, "1 epoch", [4]),  # the first step after an epoch is complete
        (Callback.on_step_end, "4 batches", [2, 4, 6]),
        (Callback.on_step_end, "0.5 epoch", [2, 3, 5, 6]),
        (Callback.on_epoch_end, "2 steps", [3, 6]),
        (Callback.on_epoch_end, "2 epochs", [6]),
        (Callback.on_step_end, "10 min", []),
        (Callback.on_step_end, numpy.int64(3), [3, 6]),
        (Callback.on_step_end, lambda run: run.progress.step == 5, [5]),
    ],
)
def test_every_takes_texts_with_a_unit_on_any_counted_moment(moment: Any, every: Any, expected: list[int]) -> None:
    assert fired_at(moment, every=every) == expected


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


def test_a_number_on_a_moment_without_a_counter_counts_how_often_it_fired() -> None:
    assert fired_at(Callback.on_fit_start, every=2) == []
    steps: list[int] = []
    third = on(Callback.on_eval_end, every=3)(lambda run, _: steps.append(run.progress.step))
    tiny_run(callbacks=[Evaluate(tiny_loader(), every="2 steps"), third], steps=20, batches=20)
    assert steps == [6, 12, 18]


def test_a_when_that_is_no_function_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"When needs a function \(run\) -> bool; got 5"):
        on(Callback.on_step_end, when=cast("Any", 5))


# -- functions as callbacks ---------------------------------------------------------------------------


def test_a_function_that_does_not_fit_its_moment_is_an_error_when_it_is_subscribed() -> None:
    with pytest.raises(MomentError, match=r"look cannot be called at on_step_end: expected \(run\), got \(run.*batch.*\)"):

        @on(Callback.on_step_end)  # type: ignore[arg-type]  # this is what the test is about
        def look(run: Run, batch: Any) -> None: ...


@pytest.mark.parametrize("moment", ["on_step_end", print, None, Recorder.listeners])
def test_subscribing_to_what_is_no_moment_is_an_error(moment: Any) -> None:
    with pytest.raises(MomentError, match=r"expected a moment, such as Callback\.on_step_end; got"):
        on(moment)


def test_an_async_function_is_an_error_as_it_would_never_run() -> None:
    async def later(run: Run) -> None: ...

    def generator(run: Run) -> Iterator[int]:
        yield 1

    for function in (later, generator):
        with pytest.raises(
            MomentError, match=r"is async or a generator, so it would never run\. Write a plain function \(run\)"
        ):
            on(Callback.on_step_end)(function)


def test_subscribing_something_that_cannot_be_called_is_an_error() -> None:
    with pytest.raises(MomentError, match="expected a function for on_step_end; got 3"):
        on(Callback.on_step_end)(cast("Any", 3))


def test_a_subscribed_function_can_be_called_and_its_repr_shows_the_schedule() -> None:
    double = on(Callback.on_step_end, every=3)(lambda run: cast("Any", run) * 2)
    assert double(21) == 42
    assert repr(double) == "<lambda>: on_step_end (every 3 steps)"


def test_builtins_and_bound_methods_can_be_subscribed() -> None:
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

    function = on(PruneMoments.on_prune, when=lambda run: run.progress.step > 1)(lambda run, ratio: heard.append(("f", ratio)))
    tiny_run(callbacks=[Pruner(), Hearing(), function], steps=2)
    assert heard == [("class", 0.1), ("class", 0.2), ("f", 0.2)]


def test_arguments_of_ones_own_moment_may_be_named() -> None:
    heard: list[float] = []
    tiny_run(
        callbacks=[
            on(PruneMoments.on_prune)(lambda run, ratio: heard.append(ratio)),
            on(Callback.on_fit_end)(lambda run: run.fire(PruneMoments.on_prune, ratio=0.5)),
        ]
    )
    assert heard == [0.5]


def test_a_class_that_declares_moments_may_have_hooks_for_others() -> None:
    heard: list[str] = []

    class Both(Callback, declares=True):
        def on_quantize(self, run: Run) -> None:
            """Called after the weights were rounded."""

        def on_step_end(self, run: Run) -> None:
            heard.append("step")

    tiny_run(callbacks=[Both()], steps=2)
    assert heard == ["step", "step"]


def test_firing_with_the_wrong_arguments_is_an_error() -> None:
    fire = cast("Any", tiny_run(steps=1).fire)
    with pytest.raises(MomentError, match=r"PruneMoments\.on_prune was fired with the wrong arguments: missing .*'ratio'"):
        fire(PruneMoments.on_prune)
    with pytest.raises(MomentError, match=r"unexpected keyword argument 'rate'"):
        fire(PruneMoments.on_prune, 0.1, rate=0.1)


def test_firing_what_is_not_declared_is_an_error() -> None:
    with pytest.raises(MomentError, match=r"Declare a moment of your own in a class with declares=True"):
        cast("Any", tiny_run(steps=1)).fire(print)


def test_an_error_in_ones_own_moment_is_named_as_any_other() -> None:
    class Bad(PruneMoments):
        def on_prune(self, run: Run, ratio: float) -> None:
            raise ValueError("broken")

    fire = on(Callback.on_step_end)(lambda run: run.fire(PruneMoments.on_prune, 0.3))
    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[Bad(), fire])
    assert caught.value.__notes__ == ["raised in Bad.on_prune (callback 1 of 2) at epoch 0, step 1, batch 1"]
