"""The report as one HTML file without external parts. Its size is limited, however long the runs are."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import pairwise

from cadenza.records.formats import counted, precise
from cadenza.report import evaluations, sections
from cadenza.report.chart import Line, chart, look
from cadenza.report.markup import Html, element, joined
from cadenza.report.story import Series, Story
from cadenza.report.thinning import means, thinned
from cadenza.version import __version__

LIMIT = 1_000_000
"""Bytes of a page."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much the page shows."""

    points: int = 36_000
    """Points of all curves together."""
    rows: int = 300
    """Rows of a table that grows with the run."""
    charts: int = 600

    def smaller(self) -> Budget:
        """Return the next smaller budget: fewer points first."""
        if self.points > 2_000:
            return replace(self, points=self.points // 2, rows=max(30, self.rows // 2))
        return replace(self, charts=self.charts // 2)


def page(stories: Sequence[Story]) -> str:
    """Return runs as one HTML page of less than `LIMIT` bytes."""
    budget = Budget()
    while len((text := _page(stories, budget)).encode()) >= LIMIT and budget.charts:
        budget = budget.smaller()
    return text


def _page(stories: Sequence[Story], budget: Budget) -> str:
    several = len(stories) > 1
    swatches = [_swatch(number) for number in range(len(stories))]
    each = partial(sections.for_each, stories, swatches)
    names = list(dict.fromkeys(name for story in stories for name in story.series))
    curves, data = _charts(stories, names[: budget.charts], budget)
    left_out = len(names) - budget.charts
    if left_out > 0:
        curves = joined([curves, element("p", f"{left_out:,} more values were logged and are left out here.", class_="note")])
    found = joined(
        part
        for part in (
            evaluations.comparison(stories, swatches),
            each(lambda story: evaluations.table(story, budget.rows)),
        )
        if part is not None
    )
    parts: list[tuple[str, Html | None]] = [
        ("Curves", curves),
        ("Evaluations", found or evaluations.none(stories)),
        ("Checkpoints", each(sections.checkpoints)),
        ("Time", each(sections.profile)),
        ("Decisions", each(lambda story: sections.decisions(story, budget.rows))),
        ("Environment", sections.environment(stories, swatches)),
        ("Plan", each(sections.plan)),
    ]
    title = ", ".join(story.name for story in stories[:4]) + (", ..." if len(stories) > 4 else "")
    cards = [
        sections.card(story, element("h2", swatch, story.name) if several else None)
        for story, swatch in zip(stories, swatches, strict=True)
    ]
    body = [
        element("header", element("p", "Cadenza report", class_="kind"), element("h1", title), _navigation(parts)),
        element("main", element("div", *cards, class_="cards"), *(_section(name, part) for name, part in parts)),
        element("footer", f"Written by Cadenza {__version__}. This file needs no network."),
    ]
    return _document(f"{title} - Cadenza report", joined(body), data)


def _document(title: str, body: Html, data: str) -> str:
    style, script = (resources.files("cadenza.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page loads nothing and runs this one script alone. The browser enforces it.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en" class="no-script">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{element("title", title)}
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _charts(stories: Sequence[Story], names: Sequence[str], budget: Budget) -> tuple[Html, str]:
    """Return the charts by group, and their data for the script."""
    if not names:
        return element(
            "p", "This run has no records. Add LogTraining(...) or Evaluate(...) to its callbacks.", class_="note"
        ), "{}"
    span = spanned(stories)
    lines = {name: [(i, story.series[name]) for i, story in enumerate(stories) if name in story.series] for name in names}
    buckets = min(2000, max(6, budget.points // (2 * sum(map(len, lines.values())))))
    groups: dict[str, list[Html]] = {}
    known = []
    for number, (name, full) in enumerate(lines.items()):
        seen = [(run, thinned(series, buckets)) for run, series in full]
        groups.setdefault(name.partition("/")[0], []).append(_figure(name, full, seen, number, span))
        drawn = zip(full, seen, strict=True)
        known.append({"name": name, "lines": [_data(run, whole, series, buckets) for (run, whole), (_, series) in drawn]})
    data = {"span": span, "runs": [{"name": story.name, "look": look(i)} for i, story in enumerate(stories)], "charts": known}
    sections_ = [_group(name, figures) for name, figures in groups.items()]
    return joined([_controls(stories), *sections_]), json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def spanned(stories: Sequence[Story]) -> tuple[int, int]:
    """Return the first and the last step of all curves, which share one axis of steps."""
    ends = [(series.steps[0], series.steps[-1]) for story in stories for series in story.series.values()]
    return min(first for first, _ in ends), max(last for _, last in ends)


def _group(name: str, figures: Sequence[Html]) -> Html:
    return element("section", element("h3", name), element("div", *figures, class_="charts"), class_="group")


def _figure(name: str, full: Sequence[Line], seen: Sequence[Line], number: int, span: tuple[int, int]) -> Html:
    before, _, last = name.rpartition("/")
    head = [element("span", f"{before}/", class_="path") if before else None, last]
    return element(
        "figure",
        element("figcaption", element("span", *head, class_="name"), element("span", *map(_last, full[:4]), class_="last")),
        element("div", chart(name, seen, number, span), class_="plot"),
        element("p", _counted(full, seen), class_="count"),
        data_chart=number,
    )


def _last(line: Line) -> Html:
    return element("span", precise(line[1].values[-1]), class_=look(line[0]), title="last value")


def _counted(full: Sequence[Line], seen: Sequence[Line]) -> str:
    points, kept = sum(len(series) for _, series in full), sum(len(series) for _, series in seen)
    gaps = sum(series.not_finite for _, series in full)
    parts = [
        counted(points, "point"),
        f"thinned to {kept:,}" if kept < points else "",
        f"{gaps:,} not finite" if gaps else "",
    ]
    return ", ".join(part for part in parts if part)


def _data(run: int, whole: Series, seen: Series, buckets: int) -> dict[str, object]:
    """Return a series for the script. A thinned series brings its means, for smoothing."""
    data = {"run": run, **_coded(seen)}
    return data if len(seen) == len(whole) else {**data, "means": _coded(means(whole, buckets))}


def _coded(series: Series) -> dict[str, object]:
    """Return steps as differences, which are short, and values with the displayed digits."""
    steps = list(series.steps)
    return {
        "x": [*steps[:1], *(after - before for before, after in pairwise(steps))],
        "y": [float(f"{value:.6g}") if math.isfinite(value) else None for value in series.values],
    }


def _controls(stories: Sequence[Story]) -> Html:
    runs = [
        element("button", _swatch(number), story.name, type="button", data_run=number, aria_pressed="true")
        for number, story in enumerate(stories)
    ]
    return element(
        "div",
        element("div", *runs, class_="legend", role="group", aria_label="runs") if len(runs) > 1 else None,
        element("label", element("input", type="checkbox", id="log"), " log scale", class_="tool"),
        element(
            "label",
            "smoothing ",
            element("input", type="range", id="smooth", min=0, max=0.99, step=0.01, value=0),
            element("output", "0", id="smooth-value"),
            class_="tool",
        ),
        element("button", "whole range", type="button", id="reset", class_="tool", hidden=True),
        element("span", "Drag across a chart to zoom, double-click for the whole range.", class_="hint"),
        class_="controls",
    )


def _section(name: str, part: Html | None) -> Html | None:
    return None if part is None else element("section", element("h2", name), part, id=name.lower())


def _navigation(parts: Sequence[tuple[str, Html | None]]) -> Html:
    links = [element("a", name, href=f"#{name.lower()}") for name, part in parts if part is not None]
    return element("nav", *links, aria_label="sections")


def _swatch(run: int) -> Html:
    return element("span", class_=f"swatch {look(run)}", aria_hidden="true")
