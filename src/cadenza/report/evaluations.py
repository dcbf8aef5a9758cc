"""The table of evaluations: one row each. The best value is marked if a callback watched the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadenza.report.best import Best, best_of
from cadenza.report.story import Story
from cadenza.status.decisions import Decision
from cadenza.status.formats import counted, precise
from cadenza.status.markup import Html, element

REGION = {"class_": "wide", "tabindex": "0", "role": "region", "aria_label": "evaluations"}
_MODES = {"max": "higher is better", "min": "lower is better"}


@dataclass(frozen=True, slots=True)
class EvaluationResults:
    """The results of a run's evaluations."""

    names: Sequence[str]
    rows: Mapping[int, Mapping[str, float]]
    """By step: the values by name."""
    epochs: Mapping[int, int]
    """By step: the completed epochs."""
    bests: Mapping[str, Best]


def evaluation_results(story: Story) -> EvaluationResults:
    """Return the results of a run's evaluations from its decisions."""
    rows: dict[int, dict[str, float]] = {}
    epochs: dict[int, int] = {}
    for decision in story.decisions:
        if results := _results(decision):
            rows.setdefault(decision.when.step, {}).update(results)
            epochs[decision.when.step] = decision.when.epoch
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    bests = {name: best for name in names if (best := best_of(story, name))}
    return EvaluationResults(names, dict(sorted(rows.items())), epochs, bests)


def _results(decision: Decision) -> dict[str, float]:
    """Return the results in a decision; empty if it is not about an evaluation or was written before version 0.2."""
    results = decision.data.get("results")
    try:
        return {name: float(value) for name, value in results.items()} if isinstance(results, Mapping) else {}
    except (TypeError, ValueError, OverflowError):
        return {}


def table(story: Story, most: int) -> Html | None:
    """Return the evaluations of a run as a table of at most about `most` rows; None without evaluations."""
    found = evaluation_results(story)
    if not found.rows:
        return None
    marks = {name: _marks(found, name) for name in found.names}
    kept = _kept(list(found.rows), {step for by_step in marks.values() for step in by_step}, most)
    head = element("tr", _column("epoch"), _column("step"), *(_column(name) for name in found.names))
    rows = [
        element("tr", _figure(found.epochs[step]), _figure(step), *(_cell(found, name, step, marks) for name in found.names))
        for step in kept
    ]
    notes = [_note(name, best) for name, best in found.bests.items()]
    if len(found.bests) < len(found.names):
        notes.append("Where no callback watched a metric, ▴ is its highest value and ▾ its lowest.")
    left_out = len(found.rows) - len(kept)
    if left_out:
        notes.append(f"{counted(left_out, 'row')} in the middle left out.")
    whole = element("table", element("thead", head), element("tbody", *rows), class_="sortable")
    note = element("p", " ".join(notes), class_="note") if notes else None
    return element("div", element("div", whole, **REGION), note)


def none(stories: Sequence[Story]) -> Html:
    """Return a note for runs without results."""
    evaluated = any(decision.what == "evaluated" for story in stories for decision in story.decisions)
    old = "The decisions of this run hold no results: a version before 0.2 wrote them. The curves show the values."
    return element("p", old if evaluated else "No evaluation took place.", class_="note")


def _marks(found: EvaluationResults, name: str) -> dict[int, str]:
    """Return the marks of a column by step: the best value, or the lowest and the highest."""
    if (best := found.bests.get(name)) is not None:
        return {best.step: "best"}
    points = [(step, row[name]) for step, row in found.rows.items() if math.isfinite(row.get(name, math.nan))]
    if len({value for _, value in points}) < 2:
        return {}
    lowest, highest = (pick(points, key=lambda point: point[1])[0] for pick in (min, max))
    return {lowest: "min", highest: "max"}


def _kept(steps: list[int], marked: set[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    ends = {*steps[: most // 4], *steps[-(most - most // 4) :], *sorted(marked)[:most]}
    return [step for step in steps if step in ends]


_SIGNS = {"best": " ★", "min": " ▾", "max": " ▴"}


def _cell(found: EvaluationResults, name: str, step: int, marks: Mapping[str, Mapping[int, str]]) -> Html:
    value = found.rows[step].get(name)
    if value is None:
        return element("td", "-", class_="none")
    mark = marks[name].get(step)
    sign = mark and element("span", _SIGNS[mark], class_="sign", aria_label=mark, role="img", title=mark)
    return element("td", precise(value), sign, class_=f"figure {mark}" if mark else "figure", data_value=repr(value))


def _note(name: str, best: Best) -> str:
    return f"★ {name}: {precise(best.value)} at step {best.step:,} ({_MODES[best.mode]}, watched by {best.who})."


def _column(name: str) -> Html:
    return element("th", element("button", name, type="button"), scope="col")


def _figure(value: float) -> Html:
    return element("td", precise(value), class_="figure", data_value=repr(value))
