"""The progress bar without a terminal: a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from cadenza.sinks.progress_view import Row, Stream
from cadenza.status.folding import encodable

_FRACTION = 0.01  # print a line if at least this fraction was done since the last one ...
_LONGEST_S = 300.0  # ... or after this time without a line


class PlainRenderer:
    """At most one line every `interval_s`, and fewer in a long run, because a log file keeps every line."""

    interval_s: float = 10.0

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        self.interval_s = interval_s or self.interval_s
        self._stream = stream

    def open(self, rows: Sequence[Row]) -> None:
        self._shown_at, self._shown = time.monotonic(), rows

    def show(self, rows: Sequence[Row]) -> None:
        if time.monotonic() - self._shown_at < _LONGEST_S and not _moved(self._shown, rows):
            return
        self._shown_at, self._shown = time.monotonic(), rows
        self._print(rows[-1])  # during an evaluation, the row of the evaluation

    def close(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._print(row)

    def _print(self, row: Row) -> None:
        # One write for the line and its end: the lines of two threads do not mix.
        stream = getattr(sys, self._stream)
        stream.write(encodable(row.line(), stream) + "\n")
        stream.flush()


def _moved(before: Sequence[Row], now: Sequence[Row]) -> bool:
    """Return whether the row has moved enough for a new line."""
    old, new = before[-1], now[-1]
    if old.unit != new.unit or old.label != new.label:
        return True
    if old.fraction is None or new.fraction is None:
        return new.done > old.done
    return abs(new.fraction - old.fraction) >= _FRACTION  # it is smaller in the next evaluation
