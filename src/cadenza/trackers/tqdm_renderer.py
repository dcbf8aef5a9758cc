"""The renderer of a progress bar that draws with tqdm, with its environment variables such as TQDM_DISABLE=1."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from cadenza.sinks.progress_renderers import ERASE, Renderer, Row, Stream, fitting
from cadenza.status.formats import plural

# Cadenza computes speed and time left: tqdm would count evaluations as training.
_KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_UNKNOWN = "{desc}: {n_fmt}{unit} [{elapsed}{postfix}]"
_LEAST_BAR = 10  # the least width of a bar


class TqdmRenderer(Renderer):
    """A bar of tqdm for each row, on stderr, or as a widget in a notebook."""

    interval_s: float = 0.5

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        super().__init__(interval_s, stream)
        self._bars: list[Any] = []
        self._size: os.terminal_size | None = None

    def open(self, rows: Sequence[Row]) -> None:
        self.show(rows)

    def show(self, rows: Sequence[Row]) -> None:
        self._erase_if_resized()
        self._draw(rows)
        if _on_terminal() and not self._bars[0].disable:
            _write("\r")  # the cursor rests at the start, as a narrower window folds the bar

    def _draw(self, rows: Sequence[Row]) -> None:
        while len(self._bars) > len(rows):  # an evaluation is over
            self._bars.pop().close()
        for bar, row in zip(self._bars, rows, strict=False):
            _update(bar, row)
        self._bars += [_bar(index, row) for index, row in enumerate(rows) if index >= len(self._bars)]

    def close(self, rows: Sequence[Row]) -> None:
        if self._bars:
            self._erase_if_resized()
            self._draw(rows)
        while self._bars:
            self._bars.pop().close()

    def _erase_if_resized(self) -> None:
        """Erase bars that a narrower window has folded."""
        if not _on_terminal():
            return
        before, self._size = self._size, os.get_terminal_size(sys.stderr.fileno())
        drawn = [bar for bar in self._bars if not bar.disable]  # TQDM_DISABLE=1 disables all
        if drawn and self._size != before:
            _write(ERASE)
            for bar in drawn:
                bar.sp = bar.status_printer(bar.fp)  # the old one pads a bar to its last width, which no longer fits


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _bar(index: int, row: Row) -> Any:
    from tqdm.auto import tqdm

    # Without the monitor thread of tqdm: the timer refreshes the bar.
    quiet: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    return quiet(
        desc=row.label,
        initial=row.done,
        total=row.total,
        unit=f" {plural(row.unit)}",
        bar_format=_format(row),
        position=index,
        leave=index == 0,
        dynamic_ncols=True,
    )


def _update(bar: Any, row: Row) -> None:
    bar.n, bar.total, bar.bar_format = row.done, row.total, _format(row)
    bar.set_description_str(row.label, refresh=False)
    bar.set_postfix_str(_postfix(row), refresh=False)
    bar.refresh()


def _postfix(row: Row) -> str:
    """Return the facts that fit into the terminal, because tqdm cuts them anywhere."""
    width = shutil.get_terminal_size().columns if _on_terminal() else math.inf
    taken = len(f"{row.label}: 100%|{' ' * _LEAST_BAR}| {row.count} [00:00]") - 1
    return fitting([fact.rstrip() for fact in row.facts], width - taken, ", ").removeprefix(", ")


def _format(row: Row) -> str:
    return _UNKNOWN if row.total is None else _KNOWN
