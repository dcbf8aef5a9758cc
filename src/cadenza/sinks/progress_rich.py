"""The progress bar in a terminal, drawn by rich at each refresh of the timer."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, TextIO, cast

from cadenza.sinks.progress_view import ERASE, Row, Stream
from cadenza.status.folding import encodable

if TYPE_CHECKING:
    from rich.text import Text

_BAR = range(10, 41)  # widths of a bar
_GAP = "  "
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class RichRenderer:
    """Rows at the bottom of the terminal. Printed lines, and lines logged to a stream, appear above them.

    The cursor rests at the start of the first row. When the window gets narrower, most terminals fold the rows and move the
    cursor with its letter, so that all the text to erase is still behind the cursor.
    """

    interval_s: float = 0.25

    def __init__(self, interval_s: float | None = None, stream: Stream = "stdout") -> None:
        self.interval_s = interval_s or self.interval_s
        self._stream = stream
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
                redirect.above.finish()
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
        facts = [_fitting(row.facts, width - taken - _BAR[0]) for row in rows]
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
    """The redirection of a standard stream, and of the log handlers that write to it, while the bar is shown."""

    def __init__(self, name: str, print_above: Callable[[Text], None], lock: RLock) -> None:
        self._name, self._real = name, getattr(sys, name)
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        self.above = _Above(print_above, self._real, lock)
        if self._real is not None and self._real.isatty():  # output to a file does not disturb the bar
            self._handlers = [handler for handler in _stream_handlers() if handler.stream is self._real]
            setattr(sys, name, self.above)
            self._set_stream(cast("TextIO", self.above))

    def end(self) -> None:
        if getattr(sys, self._name) is self.above:
            setattr(sys, self._name, self._real)
        self._set_stream(self._real)

    def _set_stream(self, stream: TextIO) -> None:
        for handler in self._handlers:
            handler.setStream(stream)


class _Above(io.TextIOBase):
    """Replaces a stream, and shows each complete line above the bar."""

    def __init__(self, print_above: Callable[[Text], None], real: TextIO, lock: RLock) -> None:
        self._print_above, self._real, self._lock = print_above, real, lock
        self._process = os.getpid()
        self._begun = ""
        self._over = False

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # a forked worker, where a thread that no longer exists may hold the lock
            return self._write_over(text)
        if self._over:  # the script kept a reference to this object
            return self._real.write(text)
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._show("\n".join(lines))
        return len(text)

    def flush(self) -> None:
        if self._over or os.getpid() != self._process:
            self._real.flush()

    def _write_over(self, text: str) -> int:
        """Overwrite the bar. The next refresh draws it below the text."""
        if not self._begun:
            self._real.write(ERASE)
        self._begun = "" if text.endswith("\n") else text
        return self._real.write(text)

    def finish(self) -> None:
        """Show an incomplete last line. Later writes go to the stream itself."""
        with self._lock:
            self._over = True
            if self._begun:
                self._show(self._begun)
                self._begun = ""

    def _show(self, text: str) -> None:
        from rich.text import Text

        # Text before a carriage return is left out, because a terminal would overwrite it.
        whole = "\n".join(line.removesuffix("\r").rpartition("\r")[2] for line in text.split("\n"))
        self._print_above(Text.from_ansi(whole))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # such as buffer and reconfigure, which TextIOBase does not have

    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # TextIOBase has a plain attribute
        return self._real.encoding


def draws_on(stream: TextIO) -> bool:
    """Return whether a bar can be drawn on a stream: a terminal that moves its cursor, and that no other bar redirects."""
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(file=stream)
    return not (isinstance(stream, _Above | FileProxy) or console.is_dumb_terminal or console.legacy_windows)


def _fitting(facts: Sequence[str], width: int) -> str:
    """Return the first facts that fit into the width."""
    text = ""
    for fact in facts:
        if len(text) + len(_GAP) + len(fact) > width:
            break
        text += _GAP + fact
    return text


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
