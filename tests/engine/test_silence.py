"""Quiet windows: for how many steps ranks exchange nothing, from what each of them expects."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cadenza.engine.silence import Silence


def quiet_steps(expected: Sequence[float], pace_s: float) -> list[int]:
    """Return the steps of a quiet window, of ranks that expect so many steps without a call, after step 1."""
    window = Silence()
    window.measure(1, pace_s)
    votes = [sum(each) for each in zip(*map(window.votes, expected), strict=True)]
    window.agree(votes, len(expected), first=2)
    return [step for step in range(2, 200) if window.covers(step)]


def test_a_quiet_window_of_ranks_that_expect_the_same_ends_at_the_next_call() -> None:
    assert quiet_steps([47, 47], 0.001) == [*range(2, 49)]
    assert quiet_steps([1, 1], 0.001) == [2]
    assert quiet_steps([0, 0], 0.001) == quiet_steps([-1, -1], 0.001) == []
    assert quiet_steps([math.inf, math.inf], 0.01) == [*range(2, 27)]  # 25 steps take a quarter of a second


def test_a_quiet_window_of_ranks_that_differ_suits_each_of_them() -> None:
    assert quiet_steps([47, 9], 0.001) == quiet_steps([9, 8, math.inf], 0.001) == [*range(2, 10)]
    assert quiet_steps([47, 1], 0.001) == []
    assert quiet_steps([200, 130], 0.01) == [*range(2, 27)]


def test_a_slow_step_is_forgotten_at_the_next_exchange() -> None:
    """However long it took: ranks are quiet again two steps later."""
    window, votes = Silence(), [2 * one for one in Silence.votes(100)]
    for step, elapsed_s in enumerate((0.001, 60.001, 60.002), 1):  # the second one takes a minute
        window.measure(step, elapsed_s)
        window.agree(votes, ranks=2, first=step + 1)
        assert window.covers(step + 1) is (step != 2)
