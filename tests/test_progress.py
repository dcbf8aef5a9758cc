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
        "max_epochs",
        "max_steps",
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
        ({"batches_per_epoch": 5}, 1, {"epoch": None, "step": None, "batch": None}),
    ],
)
def test_totals_follow_from_the_limits(limits: dict[str, int], accumulate: int, expected: dict[Any, int | None]) -> None:
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
