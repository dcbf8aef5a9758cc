"""The view of a run in a notebook: outcome and a small curve per value. It has no script, so saved notebooks keep it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cadenza.report.chart import sparkline
from cadenza.report.story import Series, story_of
from cadenza.status.formats import counted, precise
from cadenza.status.markup import Html, element

if TYPE_CHECKING:
    from cadenza.run import Run

MOST = 16
_FAULT = "color:#c4320a"
_CELL = "text-align:left;padding:1px 14px 1px 0;border:none;background:none;white-space:nowrap;vertical-align:middle"
_FIGURE = f"{_CELL};font-variant-numeric:tabular-nums"


def small(run: Run) -> str:
    """Return a run as a few kilobytes of HTML, for notebooks.

    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> shown = small(tiny_run(callbacks=[LogTraining("1 step")]))
    >>> "finished: the limit is reached" in shown, shown.count("<svg")
    (True, 4)
    """
    story = story_of(run)
    at = story.reached
    amounts = {"epoch": at.epoch if run.progress.has_epochs else None, "step": at.step}
    amounts |= {"sample": at.samples if run.progress.has_epochs else at.samples or None, "token": at.tokens or None}
    far = ", ".join(counted(amount, unit) for unit, amount in amounts.items() if amount is not None)
    ending = story.ending if story.kind else "in progress"
    lines = [element("div", element("b", story.name), f" · {ending} · {far}")]
    for fault in story.faults:
        what = "was disabled" if fault.what == "disabled" else fault.what
        lines.append(element("div", f"{fault.who} {what}: {fault.why}", style=_FAULT))
    names = list(story.series)
    if names:
        head = element("tr", *(element("th", text, scope="col", style=_CELL) for text in ("", "", "last", "min", "max")))
        rows = [_row(name, story.series[name]) for name in names[:MOST]]
        lines.append(element("table", head, *rows, style="border:none;margin:.4em 0 0;font-size:inherit"))
    if len(names) > MOST:
        lines.append(element("div", f"and {len(names) - MOST} more: {', '.join(names[MOST:])}"[:500]))
    return element("div", *lines, style="font-size:13px;line-height:1.5")


def _row(name: str, series: Series) -> Html:
    finite = [value for value in series.values if math.isfinite(value)]
    figures = [series.values[-1], min(finite, default=math.nan), max(finite, default=math.nan)]
    cells = [element("td", precise(value), style=_FIGURE) for value in figures]
    head = element("th", name, scope="row", style=f"{_CELL};font-weight:normal")
    return element("tr", head, element("td", sparkline(series), style=_CELL), *cells)
