"""The comparison table of runs: differing arguments and best values. The script also draws it as parallel axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.report.evaluations import evaluation_results
from cadenza.report.settings import differing, settings_of
from cadenza.report.story import Story
from cadenza.status.formats import counted, precise
from cadenza.status.markup import Html, element, joined

CARDS = 6
"""With more runs than this, there are no cards; the table shows the outcomes."""
METRICS, ARGUMENTS = 16, 24
"""Maximum columns of a kind."""
REGION = {"class_": "wide", "tabindex": "0", "role": "region", "aria_label": "runs"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: a value for each run, None where a run has none."""

    name: str
    kind: str
    """``"argument"``, ``"metric"``, or ``"fact"`` for the outcome, duration and the like."""
    values: Sequence[object]
    mode: str = ""
    """``"min"`` or ``"max"`` if all runs agree which is better."""


def columns_of(stories: Sequence[Story]) -> list[Column]:
    """Return the columns: facts of the runs, best values of watched metrics, last values of others, and differing arguments."""
    settings = [settings_of(story.info) for story in stories]
    names = differing(settings)[:ARGUMENTS]
    arguments = [Column(name, "argument", [setting.get(name) for setting in settings]) for name in names]
    return [*_facts(stories), *_metrics(stories)[:METRICS], *arguments]


def table(stories: Sequence[Story], swatches: Sequence[Html]) -> Html | None:
    """Return a sortable table with one row per run; None for a single run."""
    if len(stories) < 2:
        return None
    columns = columns_of(stories)
    marked = [_best(column) for column in columns]
    head = element("tr", element("th", element("button", "run", type="button"), scope="col"), *map(_head, columns))
    rows = []
    for number, (story, swatch) in enumerate(zip(stories, swatches, strict=True)):
        cells = [_cell(column.values[number], best=number in best) for column, best in zip(columns, marked, strict=True)]
        rows.append(element("tr", element("th", swatch, story.name, scope="row"), *cells, data_run=number))
    whole = element("table", element("thead", head), element("tbody", *rows), class_="sortable", id="run-table")
    notes = [element("p", text, class_="note") for text in _notes(stories)]
    parallel = element("div", class_="parallel", id="parallel") if len(stories) > 2 else None
    return joined([element("div", whole, **REGION), *notes, parallel])


def _facts(stories: Sequence[Story]) -> list[Column]:
    if len(stories) <= CARDS:
        return []
    return [
        Column("outcome", "fact", [story.kind or "in progress or killed" for story in stories]),
        Column("steps", "fact", [story.reached.step for story in stories]),
        Column("took", "fact", [story.took for story in stories]),
    ]


def _metrics(stories: Sequence[Story]) -> list[Column]:
    found = [evaluation_results(story) for story in stories]
    columns = []
    for name in dict.fromkeys(name for run in found for name in run.names):
        modes = {run.bests[name].mode if name in run.bests else "" for run in found if name in run.names}
        if len(modes) == 1 and (mode := modes.pop()):
            values = [run.bests[name].value if name in run.bests else None for run in found]
            columns.append(Column(f"{name}, best", "metric", values, mode))
        else:
            lasts = [[row[name] for row in run.rows.values() if name in row][-1:] for run in found]
            columns.append(Column(f"{name}, last", "metric", [last[0] if last else None for last in lasts]))
    return columns or [
        Column(
            f"{name}, last", "metric", [story.series[name].values[-1] if name in story.series else None for story in stories]
        )
        for name in dict.fromkeys(name for story in stories for name in story.series)
    ]


def _best(column: Column) -> set[int]:
    """Return the indices of the runs with the best value of a column."""
    known = [value for value in column.values if isinstance(value, float) and math.isfinite(value)]
    if not column.mode or not known:
        return set()
    best = max(known) if column.mode == "max" else min(known)
    return {number for number, value in enumerate(column.values) if value == best}


def _head(column: Column) -> Html:
    numeric = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column.values)
    kind = {"data_kind": column.kind, "data_mode": column.mode or None, "class_": None if numeric else "text"}
    return element("th", element("button", column.name, type="button"), scope="col", **kind)


def _cell(value: object, *, best: bool) -> Html:
    if value is None:
        return element("td", "-", class_="none")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return element("td", value, class_="long" if len(str(value)) > 40 else None)
    sign = element("span", " ★", class_="sign", aria_label="best", role="img", title="best") if best else None
    return element("td", precise(value), sign, class_="figure best" if best else "figure", data_value=repr(value))


def _notes(stories: Sequence[Story]) -> list[str]:
    arguments, metrics = len(differing([settings_of(story.info) for story in stories])), len(_metrics(stories))
    notes = [] if arguments else ["The arguments of these runs are the same."]
    left_out = [(arguments - ARGUMENTS, "argument"), (metrics - METRICS, "metric")]
    return notes + [f"{counted(count, f'more {what}')} without a column." for count, what in left_out if count > 0]
