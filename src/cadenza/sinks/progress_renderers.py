"""The renderers of a progress bar: a terminal, a notebook and lines."""

from __future__ import annotations

import html
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, TextIO

from cadenza.status.formats import counted, encodable

if TYPE_CHECKING:
    from rich.text import Text

Stream = Literal["stdout", "stderr"]

# The line of the cursor, and all lines below, from the second column: tmux takes an erased whole screen into its history.
ERASE = "\r\x1b[2K\x1b[C\x1b[J\r"


@dataclass(frozen=True, slots=True)
class Row:
    """The content of one bar. The facts are in order of importance."""

    label: str
    unit: str
    done: int
    total: int | None
    facts: tuple[str, ...] = ()

    @property
    def fraction(self) -> float | None:
        """The completed fraction, 0 to 1; None if the total is not known."""
        return min(self.done / self.total, 1.0) if self.total else None

    @property
    def count(self) -> str:
        """``120/938``, or ``120 steps``."""
        return counted(self.done, self.unit) if self.total is None else f"{self.done:>{len(str(self.total))}}/{self.total}"

    @property
    def percent(self) -> str:
        """``13%``; nothing if the total is not known."""
        return "" if self.fraction is None else f"{math.floor(self.fraction * 100):>3}%"

    def line(self) -> str:
        """Return the row as one line of plain text."""
        count = self.count if self.total is None else f"{self.unit} {self.count}"
        return "  ".join(part for part in (self.label, count, self.percent, *self.facts) if part)


class Renderer(ABC):
    """Draws rows. The timer thread calls `show`; the thread of the run calls `open` and `close`."""

    interval_s: float
    """Seconds between two refreshes."""

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        self.interval_s = interval_s or self.interval_s
        self._stream = stream

    @abstractmethod
    def open(self, rows: Sequence[Row]) -> None:
        """Draw the first rows."""

    @abstractmethod
    def show(self, rows: Sequence[Row]) -> None:
        """Draw the current rows."""

    @abstractmethod
    def close(self, rows: Sequence[Row]) -> None:
        """Draw the final rows, and restore the streams and the terminal, also after an error."""


def fitting(facts: Sequence[str], width: float, gap: str) -> str:
    """Return the first facts that fit into the width, each after a gap."""
    text = ""
    for fact in facts:
        if len(text) + len(gap) + len(fact) > width:
            break
        text += gap + fact
    return text


# -- lines, for a file, a pipe or a job ------------------------------------------------------------

_FRACTION = 0.01  # print a line if at least this fraction was done since the last one ...
_LONGEST_S = 300.0  # ... or after this time without a line


class PlainRenderer(Renderer):
    """At most one line every `interval_s`, and fewer in a long run, because a log file keeps every line."""

    interval_s: float = 10.0

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


# -- a notebook: HTML without a widget, which the saved file keeps ---------------------------------

_CELL = "padding:0 1em 0 0;text-align:left;border:none;background:none"


class NotebookRenderer(Renderer):
    """One output of the cell, which each refresh replaces."""

    interval_s: float = 0.5

    _handle: Any = None

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


# -- a terminal, drawn by rich at each refresh of the timer ----------------------------------------

_BAR = range(10, 41)  # widths of a bar
_GAP = "  "
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class RichRenderer(Renderer):
    """Rows at the bottom of the terminal. Printed lines, and lines logged to a stream, appear above them.

    The cursor rests at the start of the first row. When the window gets narrower, most terminals fold the rows and move the
    cursor with its letter, so that all the text to erase is still behind the cursor.
    """

    interval_s: float = 0.25

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        super().__init__(interval_s, stream)
        self._lock = RLock()
        self._redirects: list[_Redirect] = []
        self._is_open = False
        self._rows: Sequence[Row] = ()
        self._width = self._facts_width = 0

    def open(self, rows: Sequence[Row]) -> None:
        from rich.console import Console

        self._file: TextIO = getattr(sys, self._stream)
        self._console = Console(file=self._file, highlight=False)
        self._rows, self._is_open = rows, True
        self._write(_HIDE_CURSOR + self._frame())
        self._redirects = [_Redirect(name, self._print_above, self._lock) for name in ("stdout", "stderr")]

    def show(self, rows: Sequence[Row]) -> None:
        with self._lock:
            if self._is_open:
                self._rows = rows
                self._write(ERASE + self._frame())

    def close(self, rows: Sequence[Row]) -> None:
        if not self._is_open:
            return
        try:
            for redirect in self._redirects:
                redirect.end()
            for redirect in self._redirects:
                redirect.finish()
        finally:
            with self._lock:
                self._rows, self._is_open = rows, False
                self._write(f"{ERASE}{_NO_WRAP}{self._drawn()}{_WRAP}\n{_SHOW_CURSOR}")

    def _print_above(self, text: Text) -> None:
        with self._lock:
            self._write(ERASE + self._as_ansi(text, soft_wrap=True) + self._frame())

    def _write(self, text: str) -> None:
        # One write, so that the terminal does not show a part of it.
        self._file.write(encodable(text, self._file))
        self._file.flush()

    def _frame(self) -> str:
        """Return what draws the rows and moves the cursor back to their start, also if the window has just become narrower."""
        drawn = self._drawn()
        below = drawn.count("\n")
        return _NO_WRAP + drawn + (f"\x1b[{below}A" if below else "") + "\r" + _WRAP

    def _as_ansi(self, text: Text, **how: Any) -> str:
        with self._console.capture() as capture:
            self._console.print(text, **how)
        return capture.get()

    def _drawn(self) -> str:
        from rich.text import Text

        size = self._console.size
        rows = self._rows[-size.height :]
        width = size.width - 1  # some terminals wrap after the last column
        label_width = max(len(row.label) for row in rows)
        counts = [_GAP.join(part for part in (row.count, row.percent) if part) for row in rows]
        count_width = max(map(len, counts))
        taken = label_width + len(_GAP) + count_width + len(_GAP)
        facts = [fitting(row.facts, width - taken - _BAR[0], _GAP) for row in rows]
        if width != self._width:  # at the same width, a bar does not get longer when a fact gets shorter
            self._width, self._facts_width = width, 0
        self._facts_width = max(self._facts_width, *map(len, facts))
        bar_width = min(width - taken - self._facts_width, _BAR[-1])
        drawn = Text(no_wrap=True, overflow="crop", end="")
        for row, count, text in zip(rows, counts, facts, strict=True):
            drawn.append("\n" if drawn else "").append(f"{row.label:<{label_width}}{_GAP}", "bold")
            self._draw_bar(drawn, row.fraction, max(bar_width, 0))
            drawn.append(f"{count:>{count_width}}", "progress.percentage").append(text)
        return self._as_ansi(drawn, end="")

    def _draw_bar(self, drawn: Text, fraction: float | None, width: int) -> None:
        if fraction is None or width < _BAR[0]:
            return
        plain = self._console.options.ascii_only
        full, half = divmod(int(fraction * width * 2), 2)
        done = ("-" if plain else "━") * full + (("" if plain else "╸") if half else "")
        rest = " " * (width - len(done)) if plain or self._console.no_color else "━" * (width - len(done))
        drawn.append(done, "bar.finished" if fraction == 1 else "bar.complete").append(rest, "bar.back").append(_GAP)


class _Redirect:
    """Replaces a standard stream, also in the log handlers that write to it, and shows each complete line above the bar."""

    def __init__(self, name: str, print_above: Callable[[Text], None], lock: RLock) -> None:
        self._name, self._real = name, getattr(sys, name)
        self._print_above, self._lock, self._process = print_above, lock, os.getpid()
        self._begun = ""
        self._over = False
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        if self._real is not None and self._real.isatty():  # output to a file does not disturb the bar
            self._handlers = [handler for handler in _stream_handlers() if handler.stream is self._real]
            setattr(sys, name, self)
            self._redirect_handlers(self)

    def _redirect_handlers(self, stream: Any) -> None:
        for handler in self._handlers:
            handler.setStream(stream)

    def end(self) -> None:
        """Restore the stream."""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._real)
        self._redirect_handlers(self._real)

    def finish(self) -> None:
        """Show an incomplete last line. Later writes go to the stream itself."""
        with self._lock:
            self._over = True
            if self._begun:
                self._show(self._begun)
                self._begun = ""

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # a forked worker, where a thread that no longer exists may hold the lock
            return self._write_over(text)
        if self._over:  # the script kept a reference to this object
            return int(self._real.write(text))
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._show("\n".join(lines))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._over or os.getpid() != self._process:
            self._real.flush()

    def _write_over(self, text: str) -> int:
        """Overwrite the bar. The next refresh draws it below the text."""
        if not self._begun:
            self._real.write(ERASE)
        self._begun = "" if text.endswith("\n") else text
        return int(self._real.write(text))

    def _show(self, text: str) -> None:
        from rich.text import Text

        # Text before a carriage return is left out, because a terminal would overwrite it.
        whole = "\n".join(line.removesuffix("\r").rpartition("\r")[2] for line in text.split("\n"))
        self._print_above(Text.from_ansi(whole))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # such as isatty, fileno, encoding and buffer


def draws_on(stream: TextIO) -> bool:
    """Return whether a bar can be drawn on a stream: a terminal that moves its cursor, and that no other bar redirects."""
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(file=stream)
    return not (isinstance(stream, _Redirect | FileProxy) or console.is_dumb_terminal or console.legacy_windows)


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
