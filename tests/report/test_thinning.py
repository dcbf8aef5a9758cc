"""What sticks out is still there when a long series was thinned."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from cadenza.report.chart import WIDTH, Line, chart, sparkline
from cadenza.report.story import Series
from cadenza.report.thinning import noisy, thinned, trend, window


def series(values: list[float]) -> Series:
    return Series(array("q", range(1, len(values) + 1)), array("d", values))


def test_the_lowest_and_highest_of_each_stretch_the_first_and_the_last_are_kept() -> None:
    chance = random.Random(1)
    values = [chance.gauss(0, 1) for _ in range(10_000)]
    found = dict(thinned(series(values), 100).points)
    assert len(found) <= 2 * 100 + 2
    assert {1, 10_000} <= found.keys()
    for start in range(0, 10_000, 100):
        stretch = values[start : start + 100]
        inside = [value for step, value in found.items() if start < step <= start + 100]
        assert (min(inside), max(inside)) == (min(stretch), max(stretch))


def test_a_gap_stays_a_gap() -> None:
    values = [1.0] * 3000
    values[1500] = math.nan
    found = thinned(series(values), 10)
    assert found.not_finite == 1
    path = str(chart("a", [Line(0, found)], 0, (1, 3000)))
    assert path.count('class="line c0 m0 d0"') == 1
    assert path.partition('class="curves"')[2].partition('class="line')[0].count("M") == 2


def test_a_short_series_is_left_as_it_is() -> None:
    short = series([1.0, 2.0, 3.0])
    assert thinned(short, 2) is short


def test_steps_that_are_far_apart_are_thinned_by_step_and_not_by_number() -> None:
    steps = [*range(1000), 10**9]
    found = thinned(Series(array("q", steps), array("d", [*range(1000), 5.0])), 10)
    assert list(found.points) == [(0, 0.0), (999, 999.0), (10**9, 5.0)]


def test_the_mean_of_a_noisy_series_follows_its_curve_without_lag_and_passes_over_what_is_not_finite() -> None:
    chance = random.Random(2)
    curve = [math.exp(-i / 300) for i in range(2000)]
    values = [value + chance.gauss(0, 0.1) for value in curve]
    values[10], values[11] = math.inf, math.nan
    assert noisy(series(values))
    found = trend(series(values), 100)
    assert len(found) == 100
    assert {found.steps[0], found.steps[-1]} == {1, 2000}
    assert window(1998) == 99
    assert all(abs(value - curve[step - 1]) < 0.06 for step, value in found.points if step > 50)  # 0.1 / sqrt(99) is 0.01


@pytest.mark.parametrize(
    "values",
    [
        [math.exp(-i / 50) for i in range(500)],  # a decay
        [math.sin(i / 10) for i in range(500)],  # a cycle of many points
        [0.1 ** (i // 100) for i in range(500)],  # a schedule of steps
        [5.0] * 500,
        [1.0] * 250 + [9.0] + [1.0] * 249,  # one spike
        [5.0 + (i % 2) * 1e-12 for i in range(500)],  # rounding
        [float(i % 2) for i in range(20)],  # too few to say
        [math.nan] * 500,
    ],
)
def test_curves_and_schedules_are_not_called_noisy(values: list[float]) -> None:
    assert not noisy(series(values))


def test_values_that_can_only_be_0_or_1_are_noisy() -> None:
    chance = random.Random(4)
    assert noisy(series([float(chance.random() < 0.7) for _ in range(500)]))


def test_a_mean_of_the_largest_numbers_is_finite() -> None:
    chance = random.Random(3)
    values = [1.7e308 * chance.uniform(-1, 1) for _ in range(100)]
    assert noisy(series(values))
    assert trend(series(values), 10).not_finite == 0


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1e-300],
        [5.0, 5.0],
        [math.nan],
        [math.inf, 1.0],
        [1e300, -1e300],
        [1.7e308, -1.7e308],
        [0.0, 5e-324],
        [0.1, 0.1 + 1e-17],
        [0.3, 0.1 + 0.2],
    ],
)
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawn = str(chart("a", [Line(0, series(values))], 0, (1, len(values))))
    assert f'viewBox="0 0 {WIDTH} ' in drawn
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("Infinity", "")
    assert "<path" in sparkline(series(values))
