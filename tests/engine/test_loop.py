"""The loop's moments: which come, in which order, with which counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cadenza import Callback, Counters, on
from cadenza.callbacks import Evaluate
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer

BATCH = """
on_batch_start
on_before_backward
on_after_backward
on_batch_end
"""
UPDATE = """
on_before_optimizer_step
on_after_optimizer_step
on_before_zero_grad
on_after_zero_grad
"""


def trace(text: str) -> list[str]:
    return text.split()


def seen_when(
    *callbacks: Callback, error: type[BaseException] | None = None, **arguments: Any
) -> tuple[list[str], BaseException | None]:
    """Return the moments of a run that holds `callbacks` after a recorder, and the error with which it ended."""
    recorder = Recorder()
    if error is None:
        tiny_run(callbacks=[recorder, *callbacks], **arguments)
        return recorder.names, None
    with pytest.raises(error) as caught:
        tiny_run(callbacks=[recorder, *callbacks], **arguments)
    return recorder.names, caught.value


# -- the golden trace: 2 epochs, 5 batches, accumulate 2, Evaluate ------------------------------------


GOLDEN = """
on_setup
on_fit_start
  on_epoch_start
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
  on_epoch_end
    on_eval_start
      on_eval_batch_start
      on_eval_batch_end
      on_eval_batch_start
      on_eval_batch_end
    on_eval_end
  on_log
  on_epoch_start
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_fetch_start
      on_fetch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
  on_epoch_end
    on_eval_start
      on_eval_batch_start
      on_eval_batch_end
      on_eval_batch_start
      on_eval_batch_end
    on_eval_end
  on_log
on_fit_end
"""


def test_the_golden_trace() -> None:
    names, _ = seen_when(Evaluate(tiny_loader(2)), epochs=2, batches=5, accumulate=2)
    assert names == trace(GOLDEN)


def test_the_golden_trace_is_the_same_when_the_evaluation_stands_first() -> None:
    """The recorder then sees the end of the epoch after the evaluation that listens to it."""
    recorder = Recorder()
    tiny_run(callbacks=[Evaluate(tiny_loader(2)), recorder], epochs=2, batches=5, accumulate=2)
    evaluated = trace("on_eval_start on_eval_batch_start on_eval_batch_end on_eval_batch_start on_eval_batch_end on_eval_end")
    end = recorder.names.index("on_epoch_end")
    assert recorder.names[end - 6 : end + 2] == [*evaluated, "on_epoch_end", "on_log"]


def test_counters_seen_at_each_moment_are_those_of_completed_work() -> None:
    recorder = Recorder()
    tiny_run(callbacks=[recorder], epochs=1, batches=3, accumulate=2)
    seen = [(seen.moment.removeprefix("on_"), seen.at.epoch, seen.at.step, seen.at.batch) for seen in recorder.seen]
    assert seen == [
        ("setup", 0, 0, 0),
        ("fit_start", 0, 0, 0),
        ("epoch_start", 0, 0, 0),
        ("fetch_start", 0, 0, 0),
        ("fetch_end", 0, 0, 0),
        ("step_start", 0, 0, 0),
        ("batch_start", 0, 0, 0),
        ("before_backward", 0, 0, 0),
        ("after_backward", 0, 0, 0),
        ("batch_end", 0, 0, 1),
        ("fetch_start", 0, 0, 1),
        ("fetch_end", 0, 0, 1),
        ("batch_start", 0, 0, 1),
        ("before_backward", 0, 0, 1),
        ("after_backward", 0, 0, 1),
        ("batch_end", 0, 0, 2),
        ("before_optimizer_step", 0, 0, 2),
        ("after_optimizer_step", 0, 0, 2),
        ("before_zero_grad", 0, 0, 2),
        ("after_zero_grad", 0, 0, 2),
        ("step_end", 0, 1, 2),
        ("fetch_start", 0, 1, 2),
        ("fetch_end", 0, 1, 2),
        ("step_start", 0, 1, 2),
        ("batch_start", 0, 1, 2),
        ("before_backward", 0, 1, 2),
        ("after_backward", 0, 1, 2),
        ("batch_end", 0, 1, 3),
        ("fetch_start", 0, 1, 3),
        ("fetch_end", 0, 1, 3),
        ("before_optimizer_step", 0, 1, 3),
        ("after_optimizer_step", 0, 1, 3),
        ("before_zero_grad", 0, 1, 3),
        ("after_zero_grad", 0, 1, 3),
        ("step_end", 0, 2, 3),
        ("epoch_end", 1, 2, 3),
        ("fit_end", 1, 2, 3),
    ]


def test_samples_and_batches_of_the_epoch_are_counted() -> None:
    inside: list[Counters] = []
    look = on(Callback.on_batch_end)(lambda run, batch, outputs: inside.append(run.progress.now()))
    run = tiny_run(callbacks=[look], batches=2, epochs=2)
    assert [(at.batch_in_epoch, at.samples) for at in inside] == [(1, 2), (2, 4), (1, 6), (2, 8)]
    assert run.progress.now() == Counters(epoch=2, step=4, batch=4, batch_in_epoch=0, samples=8)


# -- other lengths ------------------------------------------------------------------------------------


class Endless:
    """A loader that does not know its length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from tiny_loader(self.batches)


def test_a_loader_of_unknown_length_gives_the_same_trace() -> None:
    known, _ = seen_when(epochs=2, batches=5, accumulate=2)
    unknown, _ = seen_when(epochs=2, loader=Endless(5), accumulate=2)
    assert unknown == known


def test_max_steps_ends_inside_an_epoch_which_then_is_not_whole() -> None:
    recorder = Recorder(Callback.on_fetch_end, Callback.on_step_end, Callback.on_epoch_end, Callback.on_stop)
    run = tiny_run(callbacks=[recorder], steps=2, batches=5)
    assert recorder.names == trace("on_fetch_end on_step_end on_fetch_end on_step_end on_epoch_end")
    assert run.progress.now() == Counters(epoch=0, step=2, batch=2, batch_in_epoch=2, samples=4)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


def test_max_steps_at_the_last_batch_makes_the_epoch_whole() -> None:
    assert tiny_run(steps=5, batches=5).progress.epoch == 1


def test_whichever_limit_comes_first_wins() -> None:
    assert tiny_run(epochs=2, steps=3, batches=5).progress.step == 3
    assert tiny_run(epochs=2, steps=99, batches=5).progress.step == 10


def test_a_last_group_that_is_short_closes_after_the_fetch_that_finds_the_loader_empty() -> None:
    names, _ = seen_when(batches=3, accumulate=2)
    ending = trace(f"{BATCH} on_fetch_start on_fetch_end {UPDATE} on_step_end on_epoch_end on_fit_end")
    assert names[-len(ending) :] == ending


def test_a_full_group_closes_right_after_its_last_batch() -> None:
    names, _ = seen_when(batches=2, accumulate=2)
    ending = trace(f"{BATCH} {UPDATE} on_step_end on_fetch_start on_fetch_end on_epoch_end on_fit_end")
    assert names[-len(ending) :] == ending


def test_a_run_that_could_not_close_what_was_opened_is_over_and_its_trainer_fits_again() -> None:
    errors = [OSError("on purpose")]

    def close() -> None:
        if errors:
            raise errors.pop()

    trainer = tiny_trainer(epochs=1, callbacks=[on(Callback.on_fit_start)(lambda run: run.at_end(close))])
    with pytest.raises(OSError, match="on purpose"):
        trainer.fit()
    assert trainer.fit().progress.epoch == 1
