"""The progress bar in a notebook: HTML without a widget, which the saved file keeps."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from typing import Any

from cadenza.sinks.progress_view import Row, Stream

_CELL = "padding:0 1em 0 0;text-align:left;border:none;background:none"


class NotebookRenderer:
    """One output of the cell, which each refresh replaces."""

    interval_s: float = 0.5

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        self.interval_s = interval_s or self.interval_s
        self._handle: Any = None

    def open(self, rows: Sequence[Row]) -> None:
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()  # type: ignore[no-untyped-call]  # IPython types only part of itself
        self._handle.display(_bundle(rows), raw=True)

    def show(self, rows: Sequence[Row]) -> None:
        self._handle.update(_bundle(rows), raw=True)

    def close(self, rows: Sequence[Row]) -> None:
        if self._handle is not None:
            self.show(rows)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _bundle(rows: Sequence[Row]) -> dict[str, str]:
    table = "".join(map(_as_html, rows))
    style = "border:none;margin:0;font-family:monospace;font-variant-numeric:tabular-nums"
    return {"text/html": f'<table style="{style}">{table}</table>', "text/plain": "\n".join(row.line() for row in rows)}


def _as_html(row: Row) -> str:
    bar = "" if row.total is None else f'<progress value="{row.done}" max="{row.total}" style="width:16em"></progress>'
    texts = (row.label, bar, row.count, row.percent, *row.facts)
    cells = [text if text is bar else html.escape(text) for text in texts]
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
