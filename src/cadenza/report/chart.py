"""Curves as SVG that need no script, for paper, mail and notebooks. The page's script redraws them at screen width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cadenza.report.axes import CHARACTER, Scale, labels, padded, room_for, ticks
from cadenza.report.story import Series
from cadenza.report.thinning import thinned
from cadenza.status.formats import precise
from cadenza.status.markup import Html, element

WIDTH, HEIGHT = 480, 210
RIGHT, TOP, BOTTOM = 14, 12, 26
"""Size and margins of a chart, in pixels; script/charts.js has the same values."""
DOTS = 40
"""A curve with at most this many points marks each point."""
CROWD = 20
"""A chart with more curves has no marks, and shows only the means of noisy series."""

COLOURS, MARKS, DASHES = 8, 4, 3


@dataclass(frozen=True, slots=True)
class Line:
    """One run in a chart."""

    run: int
    """Its index, which selects colour, mark and dashes."""
    points: Series
    """Its values, thinned."""
    mean: Series | None = None
    """The mean of a noisy series."""


@dataclass(frozen=True, slots=True)
class Act:
    """A step at which a run was steered."""

    run: int
    step: int
    text: str


def look(run: int) -> str:
    """Return a run's CSS classes. The first 12 runs are distinct without colour, the first 24 with colour."""
    return f"c{run % COLOURS} m{run % MARKS} d{run // MARKS % DASHES}"


def chart(name: str, lines: Sequence[Line], number: int, span: tuple[int, int], acts: Sequence[Act] = ()) -> Html:
    """Return a chart of one value over a span of steps: one curve per run, its acts, axes, title and description."""
    shown = [line.mean if line.mean and len(lines) > CROWD else line.points for line in lines]
    finite = [value for series in shown for value in series.values if math.isfinite(value)]
    up = Scale(*padded(min(finite, default=0.0), max(finite, default=1.0)), HEIGHT - BOTTOM, TOP)
    heights = ticks(up.low, up.high, 4)
    texts, base = labels(heights)
    across = Scale(*widened(span), room_for(texts), WIDTH - RIGHT)
    shown_runs = {line.run for line in lines}
    acts = [act for act in acts if act.run in shown_runs]
    curves = (curve for line in lines for curve in _curves(line, across, up, len(lines)))
    return element(
        "svg",
        element("title", name, id=f"title-{number}"),
        element("desc", alternative_text([line.points for line in lines], acts), id=f"desc-{number}"),
        element("g", *_heights(heights, texts, base, across, up), *_steps(across), class_="grid", aria_hidden="true"),
        element("g", *(_act(act, across) for act in acts), class_="acts", aria_hidden="true"),
        element("g", *curves, class_="curves"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"title-{number} desc-{number}",
    )


def widened(span: tuple[int, int]) -> tuple[float, float]:
    """Return a span of steps, widened around a single step so that the step is centred."""
    return (span[0] - 0.5, span[1] + 0.5) if span[0] == span[1] else span


def alternative_text(lines: Sequence[Series], acts: Sequence[Act] = ()) -> str:
    """Return the text description of a chart for screen readers."""
    first, last = (pick(series.steps[end] for series in lines) for pick, end in ((min, 0), (max, -1)))
    finite = [value for series in lines for value in series.values if math.isfinite(value)]
    extent = f"from {precise(min(finite))} to {precise(max(finite))}" if finite else "none of them finite"
    runs = "" if len(lines) == 1 else f" of {len(lines)} runs"
    steered = f" Acts at {', '.join(f'step {act.step:,}: {act.text}' for act in acts[:5])}." if acts else ""
    return f"Values{runs} over the steps {first:,} to {last:,}, {extent}.{steered}"


def sparkline(series: Series, width: int = 150, height: int = 28) -> Html:
    """Return a small inline curve in the run's colour."""
    series = thinned(series, 40)
    finite = [value for value in series.values if math.isfinite(value)]
    low, high = padded(min(finite, default=0.0), max(finite, default=1.0))
    across = Scale(*widened((series.steps[0], series.steps[-1])), 3, width - 3)
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
        # h0: drawn as a dot by the round cap
        parts.append(f"{'L' if pen else 'M'}{across(step)},{up(value)}{'h0' if lone else ''}")
        pen = True
    return "".join(parts)


def _act(act: Act, across: Scale) -> Html:
    """Return the mark of an act: a line from the top to the axis, with a flag."""
    x = across(act.step)
    return element("path", d=f"M{x},{HEIGHT - BOTTOM}V{TOP}l7,3.5l-7,3.5", class_=f"act {look(act.run)}")


def _curves(line: Line, across: Scale, up: Scale, count: int) -> list[Html]:
    kind, curves = look(line.run), []
    main = line.mean or line.points
    if line.mean is not None and count <= CROWD:
        curves.append(element("path", d=drawn(line.points, across, up), class_=f"line raw {kind}"))
    curves.append(element("path", d=drawn(main, across, up), class_=f"line {kind}"))
    points = [(step, value) for step, value in main.points if math.isfinite(value)]
    if points and (len(main) <= DOTS or count > 1) and count <= CROWD:
        spots = points if len(main) <= DOTS and line.mean is None else [points[len(points) * i // 3 - 1] for i in (1, 2, 3)]
        marks = "".join(mark(line.run, float(across(step)), float(up(value))) for step, value in spots)
        curves.append(element("path", d=marks, class_=f"marks {kind}"))
    return curves


def mark(run: int, x: float, y: float) -> str:
    """Return the path of a run's mark: a disc, a square, a triangle or a diamond."""
    x, y = round(x, 1), round(y, 1)
    return (
        f"M{x - 3:.1f},{y:.1f}a3,3 0 1 0 6,0a3,3 0 1 0 -6,0z",
        f"M{x - 2.8:.1f},{y - 2.8:.1f}h5.6v5.6h-5.6z",
        f"M{x:.1f},{y - 3.8:.1f}l3.7,6.4h-7.4z",
        f"M{x:.1f},{y - 4:.1f}l3.6,4l-3.6,4l-3.6,-4z",
    )[run % MARKS]


def _heights(values: Sequence[float], texts: Sequence[str], base: str, across: Scale, up: Scale) -> Iterable[Html]:
    left, bottom = across.start, HEIGHT - BOTTOM
    for value, text in zip(values, texts, strict=True):
        y = up(value)
        if float(y) <= bottom - 8:  # otherwise it would touch the axis below
            yield element("path", d=f"M{left},{y}H{WIDTH - RIGHT}")
            yield _label(text, left - 7, y, "y")
    if base:
        yield _label(f"from {base}", left, TOP - 2, "base")
    yield element("path", d=f"M{left},{bottom}H{WIDTH - RIGHT}", class_="axis")


def _steps(across: Scale) -> Iterable[Html]:
    bottom = HEIGHT - BOTTOM
    steps = [step for step in ticks(across.low, across.high, 5) if step == round(step)]
    texts, base = labels(steps)
    texts = [f"{round(step):,}" for step in steps] if base else texts
    taken = across.start - 7  # the end of the label "step"
    yield _label("step", taken, bottom + 17, "unit")
    for step, text in zip(steps, texts, strict=True):
        half = CHARACTER * len(text) / 2
        middle = min(float(across(step)), WIDTH - half)  # so that the last label stays inside the chart
        if middle - half > taken + 4:
            yield element("path", d=f"M{across(step)},{bottom}v4", class_="axis")
            yield _label(text, f"{middle:.1f}".removesuffix(".0"), bottom + 17, "x")
            taken = middle + half


def _label(text: str, x: object, y: object, axis: str) -> Html:
    return element("text", text, x=x, y=y, class_=axis)
