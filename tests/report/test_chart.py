"""Charts: labels of axes differ and stay inside, what sticks out survives thinning, and the colours of runs are apart."""

from __future__ import annotations

import math
import random
import re
from array import array
from itertools import combinations
from math import dist
from pathlib import Path

import pytest

from cadenza import report
from cadenza.report.axes import CHARACTER
from cadenza.report.chart import WIDTH, Line, chart, sparkline
from cadenza.report.page import SCRIPTS, STYLES
from cadenza.report.story import Series
from cadenza.report.thinning import noisy, thinned, trend, window

REPORT = Path(report.__file__).parent


def series(values: list[float]) -> Series:
    return Series(array("q", range(1, len(values) + 1)), array("d", values))


# -- axes ----------------------------------------------------------------------------------------------

VALUES = {
    "constant": [3.0, 3.0],
    "tiny range": [1.0, 1.0 + 1e-9],
    "tiny numbers": [1e-12, 3e-12],
    "large numbers": [-1e15, 1e15],
    "largest": [-1.7e308, 1.7e308],
    "a tiny range far away": [1e15, 1e15 + 2e7],
    "gaps": [math.nan, 1.0, math.inf, 2.0],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("span", [(1, 2), (7, 7), (0, 2**62), (999_999_990, 1_000_000_010), (0, 99_999)])
def test_labels_of_a_chart_differ_and_stay_inside(values: list[float], span: tuple[int, int]) -> None:
    steps = [span[0] + (span[1] - span[0]) * i // max(1, len(values) - 1) for i in range(len(values))]
    drawn = str(chart("a", [Line(0, Series(array("q", steps), array("d", values)))], 0, span))
    assert "nan" not in drawn
    across = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="x">([^<]+)<', drawn)
    assert across
    taken = 0.0
    for x, text in across:
        half = CHARACTER * len(text) / 2
        assert taken <= float(x) - half
        assert float(x) + half <= WIDTH
        taken = float(x) + half
    heights = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="y">([^<]+)<', drawn)
    assert len({text for _, text in heights}) == len(heights) >= 1
    assert all(float(x) >= 6.5 * len(text) for x, text in heights)


def test_a_single_step_is_in_the_middle() -> None:
    drawn = str(chart("a", [Line(0, Series(array("q", [5]), array("d", [1.0])))], 0, (5, 5)))
    found = re.search(r'd="M([\d.]+),[\d.]+h0" class="line', drawn)
    assert found
    assert float(found[1]) == pytest.approx((44 + WIDTH - 14) / 2, abs=15)


def test_scripts_and_styles_are_short_and_none_is_forgotten() -> None:
    for folder, names, ending in (("script", SCRIPTS, "js"), ("style", STYLES, "css")):
        assert {path.stem for path in (REPORT / folder).iterdir()} == set(names)
        assert all(len((REPORT / folder / f"{name}.{ending}").read_text().splitlines()) <= 400 for name in names)


# -- thinning and means -------------------------------------------------------------------------------


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


def test_a_short_series_is_left_as_it_is_and_steps_far_apart_are_thinned_by_step_and_not_by_number() -> None:
    short = series([1.0, 2.0, 3.0])
    assert thinned(short, 2) is short
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


def test_values_that_can_only_be_0_or_1_and_the_largest_numbers_are_noisy_with_a_finite_mean() -> None:
    chance = random.Random(4)
    assert noisy(series([float(chance.random() < 0.7) for _ in range(500)]))
    largest = series([1.7e308 * chance.uniform(-1, 1) for _ in range(100)])
    assert noisy(largest)
    assert trend(largest, 10).not_finite == 0


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


# -- colours -------------------------------------------------------------------------------------------

STYLE = (REPORT / "style" / "colours.css").read_text(encoding="utf-8")
Linear = tuple[float, ...]
Matrix = tuple[tuple[float, ...], ...]

# Machado, Oliveira and Fernandes, 2009: how linear RGB looks without one of the three kinds of cones.
SIGHTS: dict[str, Matrix] = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
OKLAB: Matrix = (
    (0.2104542553, 0.793617785, -0.0040720468),
    (1.9779984951, -2.428592205, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.808675766),
)


def times(matrix: Matrix, vector: Linear) -> Linear:
    return tuple(sum(one * other for one, other in zip(row, vector, strict=True)) for row in matrix)


def linear(colour: str) -> Linear:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def oklab(colour: Linear) -> Linear:
    inside = tuple(min(1.0, max(0.0, part)) for part in colour)
    return times(OKLAB, tuple(part ** (1 / 3) for part in times(CONES, inside)))


def colours(scheme: str, name: str) -> list[Linear]:
    found = re.findall(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", STYLE)
    return [linear(pair[scheme == "dark"]) for pair in found]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_runs_are_apart(scheme: str, sight: str) -> None:
    seen = [oklab(times(SIGHTS[sight], colour)) for colour in colours(scheme, r"c\d")]
    assert len(seen) == 8
    apart = {pair: 100 * dist(seen[pair[0]], seen[pair[1]]) for pair in combinations(range(8), 2)}
    assert min(apart.values()) > (9 if sight == "full" else 3), sorted(apart.items(), key=lambda one: one[1])[:3]
    assert min(apart[pair] for pair in combinations(range(4), 2)) > (15 if sight == "full" else 9)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_runs_can_be_read_as_text(scheme: str) -> None:
    weights = (0.2126, 0.7152, 0.0722)
    ((paper,),) = [times((weights,), one) for one in colours(scheme, "paper")]
    for (ink,) in (times((weights,), one) for one in colours(scheme, r"c\d")):
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5
