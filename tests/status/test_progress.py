"""Counters of completed work, and limits."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza import Counters, Progress


@pytest.mark.parametrize(
    "name",
    [
        "epoch",
        "step",
        "batch",
        "batch_in_epoch",
        "samples",
        "tokens",
        "max_epochs",
        "max_steps",
        "max_tokens",
        "batches_per_epoch",
        "origin",
        "finished",
    ],
)
def test_callbacks_cannot_set_it(name: str) -> None:
    with pytest.raises(AttributeError, match="has no setter"):
        setattr(Progress(max_steps=1), name, 3)


def test_limits_that_are_not_given_are_none() -> None:
    limits = Progress(max_steps=3)
    assert (limits.max_epochs, limits.max_steps, limits.batches_per_epoch) == (None, 3, None)


@pytest.mark.parametrize(
    ("limits", "accumulate", "expected"),
    [
        ({"max_epochs": 2, "batches_per_epoch": 5}, 1, {"epoch": 2, "step": 10, "batch": 10}),
        ({"max_epochs": 2, "batches_per_epoch": 5}, 2, {"epoch": 2, "step": 6, "batch": 10}),
        ({"max_steps": 7, "batches_per_epoch": 5}, 1, {"epoch": 1, "step": 7, "batch": 7}),
        ({"max_steps": 4, "batches_per_epoch": 5}, 2, {"epoch": 1, "step": 4, "batch": 7}),
        ({"max_epochs": 1, "max_steps": 99, "batches_per_epoch": 5}, 1, {"epoch": 1, "step": 5, "batch": 5}),
        ({"max_epochs": 2}, 1, {"epoch": 2, "step": None, "batch": None}),
        ({"max_steps": 9}, 1, {"epoch": None, "step": 9, "batch": None}),
        ({"max_epochs": 1, "max_steps": 9}, 1, {"epoch": None, "step": None, "batch": None}),  # either may come first
        ({"batches_per_epoch": 5}, 1, {"epoch": None, "step": None, "batch": None}),
    ],
)
def test_totals_follow_from_the_limits(limits: dict[str, Any], accumulate: int, expected: dict[Any, int | None]) -> None:
    progress = Progress(**limits)
    assert {unit: progress.total(unit, accumulate) for unit in expected} == expected


def test_it_can_begin_in_the_middle() -> None:
    progress = Progress(max_epochs=2)
    middle = Counters(epoch=1, step=7, batch=7, batch_in_epoch=2, samples=14)
    progress.begin(middle, batches_per_epoch=5)
    assert progress.now() == progress.origin == middle
    progress.finish_batch(2)
    assert progress.origin == middle
    assert progress.now() == Counters(epoch=1, step=7, batch=8, batch_in_epoch=3, samples=16)


def test_counters_read_as_a_sentence() -> None:
    assert str(Counters(epoch=1, step=2, batch=3)) == "epoch 1, step 2, batch 3"


def test_an_epoch_that_others_began_has_a_length_of_its_own_and_the_total_is_what_was_done_and_what_is_left() -> None:
    progress = Progress(max_epochs=4)
    progress.begin(Counters(epoch=1, step=8, batch=8, batch_in_epoch=3, samples=99), batches_per_epoch=10)
    progress.take_over(11)
    assert (progress.batches_per_epoch, progress.batches_per_whole_epoch) == (11, 10)
    assert progress.total("step") == 8 + 8 + 2 * 10
    assert progress.total("step", accumulate=3) == 8 + 3 + 2 * 4
    assert progress.total("batch") == 8 + 8 + 2 * 10
    assert progress.total("epoch") == 4
    for _ in range(8):
        assert progress.batches_per_epoch == 11
        progress.finish_batch(1)
    assert progress.batch_in_epoch == 11
    progress.finish_epoch()
    assert progress.batches_per_epoch == 10
    assert progress.total("step") == 8 + 8 + 2 * 10, "of the fit, not of the epoch under way"


@pytest.mark.parametrize(
    ("max_steps", "expected"),
    [
        (9, {"epoch": 1, "step": 9, "batch": 10}),  # inside the epoch in which the fit began
        (13, {"epoch": 2, "step": 13, "batch": 18}),
        (15, {"epoch": 2, "step": 15, "batch": 22}),
    ],
)
def test_totals_count_from_where_a_fit_began(max_steps: int, expected: dict[Any, int]) -> None:
    progress = Progress(max_steps=max_steps)
    progress.begin(Counters(epoch=1, step=8, batch=8, batch_in_epoch=3), batches_per_epoch=13)
    assert {unit: progress.total(unit, 2) for unit in expected} == expected


def test_tokens_are_a_counter_and_may_be_a_limit() -> None:
    progress = Progress(max_tokens=100)
    tokens = Progress.reader("token")
    assert repr(progress).endswith("; ends after 100 tokens>")
    for expected in (40, 80):
        progress.finish_batch(samples=2, tokens=40)
        assert (progress.tokens, tokens(progress), progress.now().tokens, progress.finished) == (*[expected] * 3, False)
    progress.finish_batch(samples=2, tokens=40)
    assert progress.finished, "the batch that reaches the limit is whole"


def test_with_a_limit_of_tokens_the_number_of_steps_is_not_known() -> None:
    alone = Progress(max_tokens=100, batches_per_epoch=5)
    assert [alone.total(unit) for unit in ("token", "step", "batch", "epoch")] == [100, None, None, None]
    assert alone.at_most("step") is None
    beside = Progress(max_tokens=100, max_steps=7, batches_per_epoch=5)
    assert [beside.total(unit) for unit in ("token", "step")] == [None, None]
    assert (beside.at_most("step"), beside.at_most("epoch")) == (7, 1)
