"""Labels of axes differ, and stay inside of the chart, for any values."""

from __future__ import annotations

import math
import re
from array import array
from pathlib import Path

import pytest

from cadenza.report.axes import CHARACTER, labels, padded, ticks
from cadenza.report.chart import WIDTH, Line, chart
from cadenza.report.page import SCRIPTS, STYLES
from cadenza.report.story import Series

REPORT = Path(chart.__code__.co_filename).parent
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


def test_a_range_around_a_number_is_labelled_by_its_distance() -> None:
    values = ticks(*padded(1.0, 1.0 + 1e-8), 4)
    texts, base = labels(values)
    assert len(set(texts)) == len(texts) >= 3
    assert float(base) == values[0]


def test_scripts_and_styles_are_short_and_none_is_forgotten() -> None:
    for folder, names, ending in (("script", SCRIPTS, "js"), ("style", STYLES, "css")):
        assert {path.stem for path in (REPORT / folder).iterdir()} == set(names)
        assert all(len((REPORT / folder / f"{name}.{ending}").read_text().splitlines()) <= 400 for name in names)
