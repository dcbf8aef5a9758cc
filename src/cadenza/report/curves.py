"""The charts of the page by group, their controls, and their data for the script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cadenza.report.chart import CROWD, Act, Line, chart, look, mark
from cadenza.report.story import Series, Story, act_text
from cadenza.report.thinning import noisy, thinned, trend, window
from cadenza.status.formats import counted, precise
from cadenza.status.markup import Html, element, joined

NO_RECORDS = "This run has no records. Add LogTraining(...) or Evaluate(...) to its callbacks."
MEAN_POINTS = 120
"""Maximum points of the mean of a noisy series."""
FOLDED = 4
"""If the page has more than `MANY` charts, the groups after this number are folded."""
MANY = 40
ACTS = 100
"""Maximum marked acts of a run, the newest ones."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The series of one run and its display data."""

    run: int
    whole: Series
    noisy: bool


def curves_of(stories: Sequence[Story]) -> dict[str, list[Curve]]:
    """Return the series of all runs by name."""
    runs = [story.series for story in stories]
    names = dict.fromkeys(name for series in runs for name in series)
    return {name: [Curve(i, run[name], noisy(run[name])) for i, run in enumerate(runs) if name in run] for name in names}


def charts(stories: Sequence[Story], curves: dict[str, list[Curve]], points: int) -> tuple[Html, str]:
    """Return the charts by group and their data for the script, with about `points` points in total."""
    runs = [{"name": story.name, "look": look(i)} for i, story in enumerate(stories)]
    if not curves:
        return element("p", NO_RECORDS, class_="note"), _json({"runs": runs})
    span = spanned(stories)
    each = max(12, points // sum(map(len, curves.values())))
    acts = acts_of(stories)
    groups: dict[str, list[Html]] = {}
    known = []
    for number, (name, full) in enumerate(curves.items()):
        lines = [_line(curve, each, crowded=len(full) > CROWD) for curve in full]
        groups.setdefault(name.partition("/")[0], []).append(_figure(name, full, lines, number, span, acts))
        known.append({"name": name, "lines": [_data(line) for line in lines]})
    many = len(curves) > MANY
    sections = [_group(name, figures, folded=many and i >= FOLDED) for i, (name, figures) in enumerate(groups.items())]
    marked = [{"run": act.run, "step": act.step, "text": act.text} for act in acts]
    data = {"span": span, "runs": runs, "acts": marked, "charts": known}
    return joined([_controls(stories, len(curves)), *sections]), _json(data)


def acts_of(stories: Sequence[Story]) -> list[Act]:
    """Return the acts that runs carried out."""
    done = [[act for act in story.acts if act.what == "steered"][-ACTS:] for story in stories]
    return [
        Act(run, act.when.step, f"{act_text(act)} by {act.data.get('author')}") for run, acts in enumerate(done) for act in acts
    ]


def spanned(stories: Sequence[Story]) -> tuple[int, int]:
    """Return the first and the last step of all curves, which share one axis of steps."""
    ends = [(series.steps[0], series.steps[-1]) for story in stories for series in story.series.values()]
    return min(first for first, _ in ends), max(last for _, last in ends)


def _line(curve: Curve, points: int, *, crowded: bool) -> Line:
    """Return a curve of about `points` points. On a crowded chart, most of them go to the mean of a noisy series."""
    if not curve.noisy:
        return Line(curve.run, thinned(curve.whole, min(1000, points // 2)))
    for_mean = min(MEAN_POINTS, points // 2 if crowded else points // 3)
    return Line(curve.run, thinned(curve.whole, min(1000, (points - for_mean) // 2)), trend(curve.whole, for_mean))


def _group(name: str, figures: Sequence[Html], *, folded: bool) -> Html:
    count = element("span", counted(len(figures), "chart"), class_="count")
    summary = element("summary", element("h3", name), count)
    return element("details", summary, element("div", *figures, class_="charts"), class_="group", open=not folded)


def _figure(
    name: str, full: Sequence[Curve], lines: Sequence[Line], number: int, span: tuple[int, int], acts: Sequence[Act]
) -> Html:
    before, _, last = name.rpartition("/")
    head = [element("span", f"{before}/", class_="path") if before else None, last]
    ends = element("span", *map(_last, full[:4]), class_="last") if len(full) <= 4 else None
    return element(
        "figure",
        element("figcaption", element("span", *head, class_="name"), ends),
        element("div", chart(name, lines, number, span, acts), class_="plot"),
        element("p", _counted(full, lines), class_="count"),
        element("details", element("summary", "values"), class_="values"),
        data_chart=number,
    )


def _last(curve: Curve) -> Html:
    return element("span", precise(curve.whole.values[-1]), class_=look(curve.run), title="last value")


def _counted(full: Sequence[Curve], lines: Sequence[Line]) -> str:
    points, kept = sum(len(curve.whole) for curve in full), sum(len(line.points) for line in lines)
    gaps = sum(curve.whole.not_finite for curve in full)
    means = [window(len(curve.whole) - curve.whole.not_finite) for curve in full if curve.noisy]
    around = f"{means[0]:,}" if len(set(means)) == 1 else "a 20th of the"
    parts = [
        counted(points, "point"),
        f"thinned to {kept:,}" if kept < points else "",
        f"{gaps:,} not finite" if gaps else "",
        f"strong line: mean of {around} values around each step" if means else "",
    ]
    return ", ".join(part for part in parts if part)


def _data(line: Line) -> dict[str, object]:
    """Return a series for the script, with its mean if it is noisy."""
    data = {"run": line.run, **_coded(line.points)}
    return data if line.mean is None else {**data, "mean": _coded(line.mean)}


def _coded(series: Series) -> dict[str, object]:
    """Return steps as differences (shorter) and values rounded to the digits that a chart can show."""
    steps, digits = list(series.steps), _digits(series)
    return {
        "x": [*steps[:1], *(after - before for before, after in pairwise(steps))],
        "y": [_number(value, digits) if math.isfinite(value) else None for value in series.values],
    }


def _digits(series: Series) -> int:
    """Return six digits, or more if the range is small relative to the values."""
    finite = [value for value in series.values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    spread = high / 2 - low / 2
    return min(16, max(6, math.ceil(math.log10(max(-low, high) / spread)) + 4)) if spread > 0 else 6


def _number(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _json(data: object) -> str:
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _controls(stories: Sequence[Story], count: int) -> Html:
    several = len(stories) > 1
    return element(
        "div",
        _legend(stories) if several else None,
        element("div", *_tools(several, count), class_="tools", role="group", aria_label="display of the charts"),
        class_="controls",
    )


def _legend(stories: Sequence[Story]) -> Html:
    runs = [
        element("button", swatch(number), story.name, type="button", data_run=number, aria_pressed="true")
        for number, story in enumerate(stories)
    ]
    both = [element("button", text, type="button", id=f"runs-{text}", class_="plain") for text in ("all", "none")]
    return element("div", *runs, *(both if len(stories) > 2 else []), class_="legend", role="group", aria_label="runs shown")


def _tools(several: bool, count: int) -> list[Html | None]:
    search = element(
        "label", "find ", element("input", type="search", id="search", placeholder="name of a chart"), class_="tool"
    )
    folds = [element("button", f"{verb} all", type="button", id=verb, class_="tool") for verb in ("unfold", "fold")]
    scales = {"shared": "one scale for all", "own": "own scale per run", "normalised": "normalised to 0..1"}
    options = [element("option", text, value=value) for value, text in scales.items()]
    return [
        search if count > 1 else None,
        *(folds if count > 6 else []),
        element("label", "runs ", element("select", *options, id="scale"), class_="tool") if several else None,
        element("label", element("input", type="checkbox", id="log"), " log scale", class_="tool"),
        element("label", element("input", type="checkbox", id="mean", checked=True), " mean of noisy curves", class_="tool"),
        element(
            "label",
            "smoothing ",
            element("input", type="range", id="smooth", min=0, max=0.99, step=0.01, value=0),
            element("output", "0", id="smooth-value"),
            class_="tool",
        ),
        element("button", "whole range", type="button", id="reset", class_="tool", hidden=True),
        element("span", "Drag across a chart to zoom, double-click for the whole range.", class_="hint"),
    ]


def swatch(run: int) -> Html:
    """Return a legend swatch of a run: its line and its mark."""
    line = element("path", d="M1,6H21", class_=f"line {look(run)}")
    spot = element("path", d=mark(run, 11, 6), class_=f"marks {look(run)}")
    return element("svg", line, spot, viewBox="0 0 22 12", class_="swatch", aria_hidden="true")
