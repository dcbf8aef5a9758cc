"""The report as a self-contained HTML file of limited size, regardless of the length of the runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import islice

from cadenza.report import evaluations, pictures, runs, sections
from cadenza.report.curves import Curve, charts, curves_of, swatch
from cadenza.report.story import Story
from cadenza.status.markup import Html, element, joined
from cadenza.version import __version__

LIMIT = 3_000_000
"""Maximum bytes of a page of many runs."""
ONE_RUN = 1_000_000
"""Maximum bytes of a page of one run without pictures; each further run may add `ANOTHER`."""
ANOTHER = 50_000
STYLES = ("colours", "page", "charts", "tables", "screens")
SCRIPTS = ("numbers", "axes", "view", "charts", "pointing", "controls", "tables", "parallel", "pictures", "theme", "start")


@dataclass(frozen=True, slots=True)
class Live:
    """What a server adds to the page. Then the page may also connect to the address that it came from."""

    panel: Html
    """Elements between the title and the sections."""
    style: str
    script: str
    """It runs after the other scripts, in the same scope."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much the page shows."""

    points: int
    """Total points of all curves."""
    rows: int = 300
    """Rows of a table that grows with the run."""
    charts: int = 600

    def smaller(self) -> Budget:
        """Return the next smaller budget: fewer points first."""
        if self.points > 2_000:
            return replace(self, points=self.points * 2 // 3, rows=max(30, self.rows // 2))
        return replace(self, charts=self.charts // 2)


def page(stories: Sequence[Story], live: Live | None = None) -> str:
    """Return runs as one HTML page of less than `LIMIT` bytes; of one run without pictures, less than `ONE_RUN`.

    Args:
        stories: The runs, from `story_at` or `story_of`. Their names must be distinct; see `name_distinctly`.
        live: What a server adds.

    >>> from cadenza.report import story_of
    >>> from cadenza.testing import tiny_run
    >>> text = page([story_of(tiny_run())])
    >>> text.startswith("<!doctype html>"), len(text) < ONE_RUN
    (True, True)
    """
    media = pictures.section(stories, _swatches(stories))
    of_media = len((media or "").encode())
    limit = min(LIMIT - of_media, ONE_RUN + ANOTHER * (len(stories) - 1))
    budget, curves = Budget(limit // 28), curves_of(stories)
    while len((text := _page(stories, curves, media, budget, live)).encode()) >= limit + of_media and budget.charts:
        budget = budget.smaller()
    return text


def _swatches(stories: Sequence[Story]) -> list[Html]:
    return [swatch(number) for number in range(len(stories))]


def _page(
    stories: Sequence[Story], curves: dict[str, list[Curve]], media: Html | None, budget: Budget, live: Live | None
) -> str:
    several = len(stories) > 1
    swatches = _swatches(stories)
    each = partial(sections.for_each, stories, swatches)
    rows = max(10, budget.rows // max(1, len(stories) // 3))
    shown, data = charts(stories, dict(islice(curves.items(), budget.charts)), budget.points)
    left_out = len(curves) - budget.charts
    if left_out > 0:
        shown = joined([shown, element("p", f"{left_out:,} more values were logged and are left out here.", class_="note")])
    parts: list[tuple[str, Html | None]] = [
        ("Runs", runs.table(stories, swatches)),
        ("Curves", shown),
        ("Media", media),
        ("Evaluations", each(lambda story: evaluations.table(story, rows)) or evaluations.none(stories)),
        ("Checkpoints", each(sections.checkpoints)),
        ("Time", each(sections.profile)),
        ("Ranks", each(sections.ranks)),
        ("Acts", each(lambda story: sections.acts(story, rows))),
        ("Decisions", each(lambda story: sections.decisions(story, rows))),
        ("Environment", sections.environment(stories, swatches)),
        ("Plan", each(sections.plan)),
    ]
    title = ", ".join(story.name for story in stories[:4]) + (", ..." if len(stories) > 4 else "")
    cards = [
        sections.card(story, element("h2", swatch, story.name) if several else None)
        for story, swatch in zip(stories, swatches, strict=True)
        if len(stories) <= runs.CARDS or story.problems
    ]
    theme = [element("option", text, value=value) for text, value in (("system", ""), ("light", "light"), ("dark", "dark"))]
    choice = element("label", "colours ", element("select", *theme, id="theme"), class_="theme")
    top = element("div", element("p", "Cadenza report", class_="kind"), choice, class_="top")
    body = [
        element("header", top, element("h1", title), _navigation(parts)),
        element(
            "main",
            live and live.panel,
            element("div", *cards, class_="cards") if cards else None,
            *(_section(name, part) for name, part in parts),
        ),
        element(
            "footer",
            f"Written by Cadenza {__version__}. {'Served from this machine.' if live else 'This file needs no network.'}",
        ),
        element("p", id="said", class_="unseen", role="status", aria_live="polite"),
    ]
    return _document(f"{title} - Cadenza report", joined(body), data, live)


def _files(folder: str, names: Sequence[str], ending: str) -> str:
    found = resources.files("cadenza.report").joinpath(folder)
    return "\n".join(found.joinpath(f"{name}.{ending}").read_text("utf-8") for name in names)


def _document(title: str, body: Html, data: str, live: Live | None) -> str:
    style, script = _files("style", STYLES, "css"), f'"use strict";\n{_files("script", SCRIPTS, "js")}'
    connect = ""
    if live is not None:
        style, script, connect = f"{style}\n{live.style}", f"{script}\n{live.script}", "; connect-src 'self'"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser enforces that the page loads nothing and runs only this script.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; media-src data:{connect}"
    )
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


def _section(name: str, part: Html | None) -> Html | None:
    return None if part is None else element("section", element("h2", name), part, id=name.lower())


def _navigation(parts: Sequence[tuple[str, Html | None]]) -> Html:
    links = [element("a", name, href=f"#{name.lower()}") for name, part in parts if part is not None]
    return element("nav", *links, aria_label="sections")
