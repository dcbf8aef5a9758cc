"""Requests that change the course of a run: each is taken at a fixed place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cadenza import Callback, Counters, Run, on
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run
from tests.engine.parts import moments

INSIDE = "on_step_start on_batch_start on_before_backward on_after_backward on_batch_end on_before_optimizer_step"


@pytest.mark.parametrize("name", [*INSIDE.split(), "on_after_zero_grad", "on_step_end"])
def test_a_stop_is_taken_at_the_end_of_the_step_in_which_it_was_asked_for(name: str) -> None:
    asking = on(getattr(Callback, name), when=lambda run: run.progress.step == 1 or name == "on_step_end")
    recorder, stop = Recorder(), asking(lambda run, *_: run.stop("enough"))
    run = tiny_run(callbacks=[recorder, stop], epochs=2, batches=6, accumulate=2)
    assert run.progress.step == (1 if name == "on_step_end" else 2)
    assert recorder.names[-4:] == ["on_step_end", "on_stop", "on_epoch_end", "on_fit_end"]
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")


@pytest.mark.parametrize(
    ("moment", "ending"),
    [
        (Callback.on_fit_start, "on_setup on_fit_start on_stop on_fit_end"),  # no step
        (Callback.on_epoch_start, "on_setup on_fit_start on_epoch_start on_stop on_epoch_end on_fit_end"),
        (Callback.on_epoch_end, "on_step_end on_fetch_start on_fetch_end on_epoch_end on_stop on_fit_end"),  # the first of 9
    ],
)
def test_a_stop_outside_of_steps_is_taken_at_once(moment: Any, ending: str) -> None:
    names = moments(on(moment)(lambda run, *_: run.stop("not today")), epochs=9)
    assert names[-len(ending.split()) :] == ending.split()
    assert names.count("on_epoch_end") == ending.count("on_epoch_end")


def test_the_first_of_two_stops_counts() -> None:
    first, second = (on(Callback.on_step_end)(partial(Run.stop, reason=reason)) for reason in ("first", "second"))
    run = tiny_run(callbacks=[first, second])
    assert run.outcome is not None
    assert run.outcome.reason == "first"
    assert [decision.why for decision in run.decisions] == ["first", "second"]


def test_end_epoch_ends_it_after_the_step_and_counts_it_as_whole() -> None:
    recorder = Recorder(Callback.on_step_end, Callback.on_epoch_end, Callback.on_stop)
    ending = on(Callback.on_batch_start, at=2)(lambda run, batch: run.end_epoch("seen enough"))
    run = tiny_run(callbacks=[recorder, ending], epochs=2, batches=3)
    assert recorder.names == ["on_step_end"] * 2 + ["on_epoch_end"] + ["on_step_end"] * 3 + ["on_epoch_end"]
    assert run.progress.now() == Counters(epoch=2, step=5, batch=5, batch_in_epoch=0, samples=10)
    assert run.why("epoch ended").endswith("seen enough")


def test_a_batch_skipped_at_its_start_is_counted_and_trains_nothing() -> None:
    recorder = Recorder()
    skip = on(Callback.on_batch_start)(lambda run, batch: run.skip_batch("no good"))
    run = tiny_run(callbacks=[recorder, skip], batches=1)
    step = "on_fetch_start on_fetch_end on_step_start on_batch_start on_batch_end on_step_end on_fetch_start on_fetch_end"
    assert recorder.names == f"on_setup on_fit_start on_epoch_start {step} on_epoch_end on_fit_end".split()
    assert run.progress.batch == 1
    assert torch.equal(run.model.weight, tiny_model().weight)  # type: ignore[arg-type]  # the tiny model is a Linear
    assert run.loss is None


def test_a_batch_skipped_before_backward_has_no_after_backward() -> None:
    recorder = Recorder()
    skip = on(Callback.on_before_backward)(lambda run, outputs: run.skip_batch("no good"))
    run = tiny_run(callbacks=[recorder, skip], batches=2, accumulate=2)
    one = ["on_batch_start", "on_before_backward", "on_batch_end"]
    start = recorder.names.index("on_batch_start")
    assert recorder.names[start : start + 9] == [*one, "on_fetch_start", "on_fetch_end", *one, "on_step_end"]
    assert [decision.why for decision in run.decisions if decision.what == "batch skipped"] == ["no good"] * 2


def test_a_group_of_which_one_batch_is_skipped_trains_on_the_others_alone() -> None:
    loader = tiny_loader(2)
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("no good"))
    kept = tiny_run(loader=loader, accumulate=2, callbacks=[skip])
    alone = tiny_run(loader=loader[:1])
    assert torch.equal(kept.model.weight, alone.model.weight)  # type: ignore[arg-type]  # the tiny model is a Linear


@pytest.mark.parametrize("moment", [Callback.on_after_backward, Callback.on_batch_end, Callback.on_step_start])
def test_skipping_a_batch_too_late_is_an_error(moment: Callable[..., None]) -> None:
    late = on(moment)(lambda run, *_: run.skip_batch("too late"))
    with pytest.raises(RuntimeError, match=r"on_batch_start or on_before_backward"):
        tiny_run(callbacks=[late])


def test_skipping_too_late_a_batch_that_was_skipped_already_is_an_error_too() -> None:
    early = on(Callback.on_batch_start)(lambda run, batch: run.skip_batch("in time"))
    late = on(Callback.on_batch_end)(lambda run, batch, outputs: run.skip_batch("too late"))
    with pytest.raises(RuntimeError, match="too late"):
        tiny_run(callbacks=[early, late])
