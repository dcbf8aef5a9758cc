"""A real terminal for a script, and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

_COMMAND = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class Screen:
    """What a terminal shows after `text`: carriage returns, cursor up, erased lines, the cursor hidden. It never scrolls."""

    def __init__(self, text: str, width: int) -> None:
        self.lines = [""]
        self.cursor_shown = True
        self._row = self._column = 0
        self._width = width
        at = 0
        while at < len(text):
            command = _COMMAND.match(text, at)
            if command:
                self._obey(*command.groups())
                at = command.end()
            else:
                self._put(text[at])
                at += 1

    def _obey(self, private: str, number: str, what: str) -> None:
        match private + what:
            case "A":
                self._row -= int(number or 1)
                assert self._row >= 0, "the cursor went above the first line"
            case "K":
                assert number == "2", "only whole lines are erased"
                self.lines[self._row] = ""
            case "?h" | "?l":
                assert number == "25", "only the cursor is hidden and shown"
                self.cursor_shown = what == "h"
            case "m":
                pass  # colour
            case other:
                raise AssertionError(f"a command that is not known here: {other!r}")

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._down()
        else:
            if self._column == self._width:
                self._down()
                self._column = 0
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")


def environment(**variables: str) -> dict[str, str]:
    """Return an environment in which only `variables` decide about the output."""
    decisive = {"CI", "SLURM_JOB_ID", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES"}
    kept = {name: value for name, value in os.environ.items() if name not in decisive}
    return {**kept, "TERM": "xterm-256color", **variables}


def shown_in_terminal(script: str, *, width: int = 100, variables: Mapping[str, str] | None = None) -> tuple[Screen, str]:
    """Run a Python script in a terminal of its own; return what is on the screen at its end, and all that was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(**(variables or {})),
        start_new_session=True,
    )
    os.close(theirs)
    written = bytearray()
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(4096):
                written += part
        except OSError:  # Linux raises this when the other end is closed
            pass
    process.wait(timeout=60)
    text = written.decode()
    return Screen(text, width), text
