"""Curves as SVG, which need no script: on paper, in a mail, in a notebook. On zoom, page.js redraws them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cadenza.records.formats import precise, short
from cadenza.report.markup import Html, element
from cadenza.report.story import Series
from cadenza.report.thinning import thinned

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
"""Of the chart and its margins, in pixels; page.js has the same."""
BUCKETS = 220
DOTS = 40
"""A curve of at most this many points shows each of them."""

COLOURS = 8
"""Of curves; page.css has them. A ninth run has the first colour again, dashed."""

Line = tuple[int, Series]
"""The number of a run, which gives the colour, and its series."""


class Scale:
    """Maps numbers to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start = low, high, start
        self._pixels = (end - start) / ((high - low) or 1.0)

    def __call__(self, value: float) -> str:
        return f"{self.start + (value - self.low) * self._pixels:.1f}".removesuffix(".0")


def chart(name: str, lines: Sequence[Line], number: int, span: tuple[int, int]) -> Html:
    """Return a chart of one name over a span of steps: one curve per run, axes, title and description."""
    finite = [value for _, series in lines for value in series.values if math.isfinite(value)]
    low, high = padded(min(finite, default=0.0), max(finite, default=1.0))
    across, up = Scale(*span, LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)
    return element(
        "svg",
        element("title", name, id=f"title-{number}"),
        element("desc", described(lines), id=f"desc-{number}"),
        element("g", *_grid(across, up), class_="grid", aria_hidden="true"),
        element("g", *(curve for run, series in lines for curve in _curves(run, series, across, up)), class_="curves"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"title-{number} desc-{number}",
    )


def look(run: int) -> str:
    """Return the classes that give a run its colour and its dashes."""
    return f"c{run % COLOURS} d{run // COLOURS % 3}"


def described(lines: Sequence[Line]) -> str:
    """Return a text about a chart, for screen readers."""
    first, last = (pick(series.steps[end] for _, series in lines) for pick, end in ((min, 0), (max, -1)))
    finite = [value for _, series in lines for value in series.values if math.isfinite(value)]
    extent = f"from {precise(min(finite))} to {precise(max(finite))}" if finite else "none of them finite"
    runs = "" if len(lines) == 1 else f" of {len(lines)} runs"
    return f"Values{runs} over the steps {first:,} to {last:,}, {extent}."


def sparkline(series: Series, width: int = 150, height: int = 28) -> Html:
    """Return a small curve for a line of text, in its colour."""
    series = thinned(series, 40)
    finite = [value for value in series.values if math.isfinite(value)]
    low, high = padded(min(finite, default=0.0), max(finite, default=1.0))
    across = Scale(series.steps[0], series.steps[-1], 3, width - 3)
    path = drawn(series, across, Scale(low, high, height - 2, 2))
    line = element("path", d=path, fill="none", stroke="currentColor", stroke_width="1.4", stroke_linecap="round")
    return element("svg", line, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label="curve")


def drawn(series: Series, across: Scale, up: Scale) -> str:
    """Return the path of a curve, with a gap where a value is not finite."""
    parts, pen = [], False
    for i, (step, value) in enumerate(series.points):
        if not math.isfinite(value):
            pen = False
            continue
        lone = not pen and not (i + 1 < len(series) and math.isfinite(series.values[i + 1]))
        parts.append(f"{'L' if pen else 'M'}{across(step)},{up(value)}{'h0' if lone else ''}")  # h0: a dot, by its round cap
        pen = True
    return "".join(parts)


def padded(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, a little outside of the values. A line of equal values is in the middle."""
    spread = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0  # less is rounding
    room = spread * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`.

    >>> ticks(0.03, 0.98, 4), ticks(0, 1200, 3)
    ([0.2, 0.4, 0.6, 0.8], [0.0, 500.0, 1000.0])
    """
    rough = (high - low) / count
    if not (math.isfinite(rough) and rough > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.7)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, min(digits, 300)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _curves(run: int, series: Series, across: Scale, up: Scale) -> list[Html]:
    seen = thinned(series, BUCKETS)
    curves = [element("path", d=drawn(seen, across, up), class_=f"line {look(run)}")]
    if len(series) <= DOTS:
        dots = "".join(f"M{across(step)},{up(value)}h0" for step, value in series.points if math.isfinite(value))
        curves.append(element("path", d=dots, class_=f"dots {look(run)}"))
    return curves


def _grid(across: Scale, up: Scale) -> list[Html]:
    bottom = HEIGHT - BOTTOM
    marks = []
    for value in ticks(up.low, up.high, 4):
        y = up(value)
        if float(y) > bottom - 8:  # it would touch the axis below
            continue
        marks += [element("path", d=f"M{LEFT},{y}H{WIDTH - RIGHT}"), _label(short(value), LEFT - 7, y, "y")]
    for step in ticks(across.low, across.high, 5):
        if step == round(step) and float(across(step)) > LEFT + 16:  # beside the label "step"
            marks += [_label(short(step), across(step), bottom + 17, "x")]
    marks += [
        _label("step", LEFT - 7, bottom + 17, "unit"),
        element("path", d=f"M{LEFT},{bottom}H{WIDTH - RIGHT}", class_="axis"),
    ]
    return marks


def _label(text: str, x: object, y: object, axis: str) -> Html:
    return element("text", text, x=x, y=y, class_=axis)
