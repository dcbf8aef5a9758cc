"""What to keep: the newest, the best by each monitor, and what holds after a write that fails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.retention import Kept, Last, Retention
from tests.checkpoint.store.contents import filled


def better(retention: Retention, value: float, *, step: int, monitor: int = 0, weights: str | None = None) -> bool:
    """Report a value of a monitor, as an evaluation after `step` does."""
    best = retention.best[monitor]
    if found := best.monitor.gets_better(value):
        best.choose(step, weights)
    return found


def loss() -> Retention:
    return Retention(1, ("eval/loss", "min"))


def test_a_better_value_is_pending_until_a_checkpoint_is_assigned() -> None:
    retention = loss()
    assert not retention.pending
    assert better(retention, 0.5, step=2)
    assert retention.pending
    retention.assign("step-00000002", usable=True)
    assert (retention.pending, retention.kept) == (False, [Kept("step-00000002", 0.5)])
    assert not better(retention, 0.6, step=3)
    assert retention.kept == [Kept("step-00000002", 0.5)]


def test_a_checkpoint_without_a_better_value_is_not_the_best() -> None:
    retention = loss()
    better(retention, 0.5, step=2)
    retention.assign("step-00000002", usable=True)
    retention.assign("step-00000003", usable=True)
    assert retention.kept == [Kept("step-00000002", 0.5)]


def test_weights_that_are_not_finite_drop_the_value_and_the_search_goes_on_from_the_kept_one() -> None:
    retention = loss()
    better(retention, 0.5, step=2)
    retention.assign("step-00000002", usable=True)
    better(retention, 0.1, step=3)
    retention.assign("step-00000003", usable=False)
    assert (retention.pending, retention.kept) == (False, [Kept("step-00000002", 0.5)])
    assert better(retention, 0.4, step=4)


def lost() -> tuple[Retention, list[Kept], list[Kept]]:
    """Return a retention that has lost its second best checkpoint, and the best ones before and after this write."""
    retention = loss()
    better(retention, 0.5, step=2)
    retention.assign("step-00000002", usable=True)
    before = retention.kept
    better(retention, 0.3, step=4)
    retention.assign("step-00000004", usable=True)
    return retention, before, retention.kept


def test_after_a_lost_write_the_checkpoint_before_is_the_best_and_a_value_between_the_two_gets_better() -> None:
    retention, before, _ = lost()
    retention.restore(before)
    assert (retention.pending, retention.kept) == (False, [Kept("step-00000002", 0.5)])
    assert better(retention, 0.4, step=6)
    retention.assign("step-00000006", usable=True)
    assert retention.kept == [Kept("step-00000006", 0.4)]


def test_a_better_value_that_came_during_a_lost_write_stays_pending() -> None:
    retention, before, _ = lost()
    better(retention, 0.2, step=5)
    retention.restore(before)
    assert retention.pending
    assert not better(retention, 0.25, step=6)
    retention.assign("step-00000006", usable=True)
    assert retention.kept == [Kept("step-00000006", 0.2)]


def test_a_lost_checkpoint_that_a_later_attempt_writes_is_the_best_again() -> None:
    retention, before, after = lost()
    retention.restore(before)
    retention.restore(after)
    assert (retention.pending, retention.kept) == (False, [Kept("step-00000004", 0.3)])
    assert not better(retention, 0.4, step=6)


@pytest.mark.parametrize(("between", "pending", "best"), [(0.4, False, 0.3), (0.2, True, 0.2)])
def test_a_value_that_came_before_the_late_success_counts_only_if_it_is_better(
    between: float, pending: bool, best: float
) -> None:
    retention, before, after = lost()
    retention.restore(before)
    assert better(retention, between, step=5)
    retention.restore(after)
    assert (retention.pending, retention.best[0].monitor.best) == (pending, best)
    assert retention.kept == [Kept("step-00000004", 0.3)]


def test_the_state_names_the_checkpoint_that_holds_it_and_comes_back() -> None:
    retention, other = Retention(1, [("eval/acc", "max"), ("eval/loss", "min")]), loss()
    better(retention, 0.5, step=2, monitor=1, weights="ema")
    retention.assign("step-00000002", usable=True)
    assert retention.best[0].state_dict() == {"name": None, "best": -math.inf}
    state = retention.best[1].state_dict()
    assert state == {"name": "step-00000002", "best": 0.5, "weights": "ema", "chosen_at": 2}
    better(other, 0.1, step=1)
    other.best[0].load_state_dict(state)
    assert (other.pending, other.kept) == (False, [Kept("step-00000002", 0.5)])
    assert not better(other, 0.6, step=3)
    assert [other.averaged(step) for step in (1, 2, 3)] == [None, "ema", None]


def test_of_two_monitors_the_first_names_the_averaged_weights() -> None:
    retention = Retention(1, [("eval/acc", "max"), ("eval/loss", "min")])
    better(retention, 0.5, step=2, monitor=1, weights="ema")
    better(retention, 0.5, step=2, monitor=0, weights="swa")
    assert retention.averaged(2) == "swa"


def test_a_best_checkpoint_that_no_longer_exists_is_forgotten() -> None:
    retention = Retention(1, [("eval/acc", "max"), ("eval/loss", "min")])
    for monitor in (0, 1):
        better(retention, 0.5, step=2 + monitor, monitor=monitor)
        retention.assign(f"step-0000000{2 + monitor}", usable=True)
    [warning] = retention.forget_missing(["step-00000002"])
    assert warning == "step-00000003, the best by eval/loss, no longer exists: the search for the best starts again"
    assert retention.kept == [Kept("step-00000002", 0.5), Kept(None, math.inf)]
    assert better(retention, 0.9, step=4, monitor=1)


@pytest.mark.parametrize(("keep_last", "expected"), [(1, [2, 6]), (3, [2, 4, 5, 6]), (None, [1, 2, 3, 4, 5, 6])])
def test_what_no_rule_names_is_deleted(tmp_path: Path, keep_last: int | None, expected: list[int]) -> None:
    store, saved = filled(tmp_path, *range(1, 7))
    retention = Retention(keep_last, ("eval/loss", "min"))
    better(retention, 0.5, step=2)
    retention.assign("step-00000002", usable=True)
    gone = retention.prune(store, saved[-1])
    assert [one.step for one in store.saved()] == expected
    assert len(gone) == 6 - len(expected)


def test_of_a_step_that_was_saved_twice_the_last_counts_and_the_newest_write_always_stays(tmp_path: Path) -> None:
    store, saved = filled(tmp_path, 2, 3, 3)
    assert Retention(2, ()).prune(store, saved[1]) == []
    assert Retention(2, ()).prune(store, saved[2]) == ["step-00000003"]


@pytest.mark.parametrize("count", [0, -1, 1.5, None])
def test_a_wrong_number_of_newest_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="keep_last must be a whole number of at least 1"):
        Last(count)
