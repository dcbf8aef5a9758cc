"""The loop's moments and counters, also with a loader of unknown or wrong length, and requests that change its course."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from cadenza import Callback, Counters, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, ScheduleValue, Swa, Warmup
from cadenza.hooks.listener import Listener
from cadenza.hooks.subscription import periodic
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import Unsized, moments
from tests.long import LONG

FETCH = "on_fetch_start on_fetch_end"
BATCH = "on_batch_start on_before_backward on_after_backward on_batch_end"
UPDATE = "on_before_optimizer_step on_after_optimizer_step on_before_zero_grad on_after_zero_grad"


GROUP = f"{FETCH} on_step_start {BATCH} {FETCH} {BATCH} {UPDATE} on_step_end"
SHORT = f"{FETCH} on_step_start {BATCH} {FETCH} {UPDATE} on_step_end"  # the fetch finds the loader empty
EVALUATION = "on_eval_start on_eval_batch_start on_eval_batch_end on_eval_batch_start on_eval_batch_end on_eval_end"
EPOCH = f"on_epoch_start {GROUP} {GROUP} {SHORT} on_epoch_end {EVALUATION} on_log"


def test_the_golden_trace_is_that_of_a_loader_of_unknown_length_too_and_an_evaluation_in_front_follows_its_moment() -> None:
    expected = ["on_setup", "on_fit_start", *EPOCH.split(), *EPOCH.split(), "on_fit_end"]
    assert moments(Evaluate(tiny_loader(2)), epochs=2, batches=5, accumulate=2) == expected
    assert moments(Evaluate(tiny_loader(2)), epochs=2, loader=Unsized(tiny_loader(5)), accumulate=2) == expected
    recorder = Recorder()
    tiny_run(callbacks=[Evaluate(tiny_loader(2)), recorder], epochs=2, batches=5, accumulate=2)
    end = recorder.names.index("on_epoch_end")
    assert recorder.names[end : end + 8] == ["on_epoch_end", *EVALUATION.split(), "on_log"]


FORWARD = BATCH.removesuffix(" on_batch_end")


def test_counters_seen_at_each_moment_are_those_of_completed_work() -> None:
    recorder = Recorder()
    tiny_run(callbacks=[recorder], epochs=1, batches=3, accumulate=2)
    seen = [(seen.moment, seen.at.epoch, seen.at.step, seen.at.batch) for seen in recorder.seen]
    expected = [
        (f"on_setup on_fit_start on_epoch_start {FETCH} on_step_start {FORWARD}", 0, 0, 0),
        (f"on_batch_end {FETCH} {FORWARD}", 0, 0, 1),
        (f"on_batch_end {UPDATE}", 0, 0, 2),
        (f"on_step_end {FETCH} on_step_start {FORWARD}", 0, 1, 2),
        (f"on_batch_end {FETCH} {UPDATE}", 0, 1, 3),
        ("on_step_end", 0, 2, 3),
        ("on_epoch_end on_fit_end", 1, 2, 3),
    ]
    assert seen == [(moment, *counters) for names, *counters in expected for moment in names.split()]


def test_samples_and_batches_of_the_epoch_are_counted() -> None:
    inside: list[Counters] = []
    look = on(Callback.on_batch_end)(lambda run, batch, outputs: inside.append(run.progress.now()))
    run = tiny_run(callbacks=[look], batches=2, epochs=2)
    assert [(at.batch_in_epoch, at.samples) for at in inside] == [(1, 2), (2, 4), (1, 6), (2, 8)]
    assert run.progress.now() == Counters(epoch=2, step=4, batch=4, batch_in_epoch=0, samples=8)


def test_max_steps_ends_inside_an_epoch_which_then_is_not_whole_and_whichever_limit_comes_first_wins() -> None:
    recorder = Recorder(Callback.on_fetch_end, Callback.on_step_end, Callback.on_epoch_end, Callback.on_stop)
    run = tiny_run(callbacks=[recorder], steps=2, batches=5)
    assert recorder.names == ["on_fetch_end", "on_step_end", "on_fetch_end", "on_step_end", "on_epoch_end"]
    assert run.progress.now() == Counters(epoch=0, step=2, batch=2, batch_in_epoch=2, samples=4)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert tiny_run(steps=5, batches=5).progress.epoch == 1
    assert tiny_run(epochs=2, steps=3, batches=5).progress.step == 3
    assert tiny_run(epochs=2, steps=99, batches=5).progress.step == 10


@pytest.mark.parametrize(
    ("batches", "ending"),
    [
        pytest.param(3, f"{BATCH} {FETCH} {UPDATE} on_step_end", id="a short group, after the fetch that finds no batch"),
        pytest.param(2, f"{BATCH} {UPDATE} on_step_end {FETCH}", id="a full group, right after its last batch"),
    ],
)
def test_the_last_group_closes_where_its_last_batch_is_known(batches: int, ending: str) -> None:
    expected = f"{ending} on_epoch_end on_fit_end".split()
    assert moments(batches=batches, accumulate=2)[-len(expected) :] == expected


def test_a_run_that_could_not_close_what_was_opened_is_over_and_its_trainer_fits_again() -> None:
    errors = [OSError("on purpose")]

    def close() -> None:
        if errors:
            raise errors.pop()

    trainer = tiny_trainer(epochs=1, callbacks=[on(Callback.on_fit_start)(lambda run: run.at_end(close))])
    with pytest.raises(OSError, match="on purpose"):
        trainer.fit()
    assert trainer.fit().progress.epoch == 1


BOTH: dict[str, Any] = {"epochs": 1, "steps": 1000}
EITHER = (
    r"with max_epochs=1 and max_steps=1000 either limit may come first. Give Trainer max_steps= alone, or a loader with __len__"
)


def fall(optimizer: torch.optim.Optimizer, total: int) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.1, total_iters=total)


@pytest.mark.parametrize(
    "callback",
    [
        LearningRate(fall),
        Warmup(0.1),
        Swa(0.75),
        ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "lr", lambda step, total: step / total),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_made_to_the_length_of_the_run_is_refused(callback: Any) -> None:
    with pytest.raises(ValueError, match=EITHER):
        tiny_run(loader=Unsized(tiny_loader(7)), callbacks=[callback], **BOTH)


def test_the_plan_gives_the_limit_as_a_limit_and_with_max_steps_alone_the_total_is_known() -> None:
    one = LearningRate(fall)
    tiny_run(loader=Unsized(tiny_loader(7)), callbacks=[one], steps=20)
    assert one.total == 20
    late = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "lr", {0: 0.1}, every="2000 steps")
    plan = str(tiny_trainer(loader=Unsized(tiny_loader(7)), callbacks=[late], **BOTH).plan())
    assert "fit: 1 epoch, at most 1,000 steps, on cpu" in plan
    assert "never fires: the run ends after at most 1000 steps" in plan
    assert tiny_run(loader=Unsized(tiny_loader(7)), **BOTH).progress.step == 7


class Lying:
    """A loader with another number of batches than it says, and of which a position can be had."""

    def __init__(self, says: int, has: int) -> None:
        self.says, self.has = says, has

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_loader(self.has))


class AtFractions(Callback):
    """Notes at which steps a cadence is due."""

    def __init__(self, every: str) -> None:
        self.every, self.steps = every, list[int]()

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, lambda run: self.steps.append(run.progress.step))]


@pytest.mark.parametrize(("says", "in_first"), [(8, [4]), (2, [1, 2, 3, 4])])
def test_it_is_told_once_and_fractions_are_right_from_the_second_epoch_on(
    says: int, in_first: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    halves = AtFractions("0.5 epoch")
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = tiny_run(loader=Lying(says, 4), epochs=3, callbacks=[halves])
    assert halves.steps == [*in_first, 6, 8, 10, 12]
    assert run.progress.batches_per_epoch == 4
    assert run.progress.total("step") == run.progress.step == 12
    told = f"the length of the training loader says {says} batches, but epoch 1 had 4"
    assert run.why("length corrected").endswith(told)
    assert caplog.text.count(told) == caplog.text.count("the length of the training loader") == 1
    assert f"warm-ups that were made for {says} do not change" in caplog.text


@pytest.mark.parametrize("ends", ["request", "limit", "true"])
def test_an_epoch_that_is_cut_short_says_nothing_of_the_loader(ends: str) -> None:
    leave = on(Callback.on_step_end, at=2)(lambda run: run.end_epoch("enough"))
    callbacks = [leave] if ends == "request" else []
    run = tiny_run(loader=Lying(5, 5), epochs=1, steps=3 if ends == "limit" else None, callbacks=callbacks)
    assert not any(decision.what == "length corrected" for decision in run.decisions)


@pytest.mark.parametrize("cut", [3, 4, 5, 7] if LONG else [3, 5])
def test_a_run_that_continues_goes_on_with_what_was_found(tmp_path: Path, cut: int) -> None:
    """The loader says 8 again: that is no other loader, and fractions, warm-up and averaging are those of one run."""

    def fit(directory: Path, kill_at: int) -> tuple[Run | None, list[int]]:
        quarters = AtFractions("0.25 epoch")

        @on(Callback.on_step_start)
        def kill(run: Run) -> None:
            if run.progress.step == kill_at:
                raise KeyboardInterrupt

        callbacks = [quarters, Warmup("1 epoch"), Swa(0.25, "1 step"), Checkpoint("1 step"), kill]
        made = tiny_trainer(loader=Lying(8, 4), epochs=3, callbacks=callbacks, directory=directory)
        run = None
        with suppress(KeyboardInterrupt):
            run = made.fit(resume="auto", replay=True)
        return run, quarters.steps

    whole, at_once = fit(tmp_path / "whole", kill_at=-1)
    killed, before = fit(tmp_path / "cut", kill_at=cut)
    run, after = fit(tmp_path / "cut", kill_at=-1)
    assert killed is None
    assert run is not None
    assert whole is not None
    assert before + after == at_once
    assert run.progress.now() == whole.progress.now()
    assert all(a.equal(b) for a, b in zip(run.model.parameters(), whole.model.parameters(), strict=True))


# -- requests that change the course of a run --------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["on_step_start", *BATCH.split(), "on_before_optimizer_step", "on_after_zero_grad", "on_step_end"]
)
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
def test_skipping_a_batch_too_late_is_an_error_also_one_that_was_skipped_already(moment: Any) -> None:
    late = on(moment)(lambda run, *_: run.skip_batch("too late"))
    with pytest.raises(RuntimeError, match=r"on_batch_start or on_before_backward"):
        tiny_run(callbacks=[late])
    early = on(Callback.on_batch_start)(lambda run, batch: run.skip_batch("in time"))
    if moment is Callback.on_batch_end:
        with pytest.raises(RuntimeError, match="too late"):
            tiny_run(callbacks=[early, late])
