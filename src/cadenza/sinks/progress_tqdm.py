"""The progress bar drawn by tqdm, with its environment variables such as ``TQDM_DISABLE=1``."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from cadenza.sinks.progress_view import Row, Stream
from cadenza.status.counting import plural

# Cadenza computes speed and time left: tqdm would count evaluations as training.
_KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_UNKNOWN = "{desc}: {n_fmt}{unit} [{elapsed}{postfix}]"
_BAR = 10  # the least width of a bar


class TqdmRenderer:
    """A bar of tqdm for each row, on stderr, or as a widget in a notebook."""

    interval_s: float = 0.5

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        self.interval_s = interval_s or self.interval_s
        self._bars: list[Any] = []

    def open(self, rows: Sequence[Row]) -> None:
        self.show(rows)

    def show(self, rows: Sequence[Row]) -> None:
        while len(self._bars) > len(rows):  # an evaluation is over
            self._bars.pop().close()
        for bar, row in zip(self._bars, rows, strict=False):
            _update(bar, row)
        self._bars += [_bar(index, row) for index, row in enumerate(rows) if index >= len(self._bars)]

    def close(self, rows: Sequence[Row]) -> None:
        if self._bars:
            self.show(rows)
        while self._bars:
            self._bars.pop().close()


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
    bar.set_postfix_str(_fitting(row), refresh=False)
    bar.refresh()


def _fitting(row: Row) -> str:
    """Return the first facts that fit into the terminal, which tqdm would cut."""
    width = shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else math.inf
    taken = len(f"{row.label}: 100%|{' ' * _BAR}| {row.count} [00:00]") - 1
    text = ""
    for fact in row.facts:
        if taken + len(text) + len(f", {fact.rstrip()}") > width:
            break
        text += f"{', ' if text else ''}{fact.rstrip()}"
    return text


def _format(row: Row) -> str:
    return _UNKNOWN if row.total is None else _KNOWN
