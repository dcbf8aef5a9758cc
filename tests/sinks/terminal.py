"""A real terminal for a script, and what a person would see on it."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

import pyte


class Screen:
    """What a terminal shows after `text`. It never scrolls."""

    def __init__(self, text: str = "", width: int = 100) -> None:
        self._start(width)
        self.feed(text)

    def _start(self, width: int) -> None:
        self._screen = _Rows(width, 400)
        self._stream = pyte.Stream(self._screen)
        self._width = width

    @property
    def lines(self) -> list[str]:
        """The lines down to the cursor, or to the last one that is not empty."""
        shown = [line.rstrip() for line in self._screen.display]
        last = max((row for row, line in enumerate(shown) if line), default=0)
        return shown[: max(last, self._screen.cursor.y) + 1]

    @property
    def text(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in self.lines if line]

    @property
    def cursor_shown(self) -> bool:
        return not self._screen.cursor.hidden

    def feed(self, text: str) -> None:
        """Show more text."""
        self._stream.feed(text)

    def resize(self, width: int) -> None:
        """Change the width as most terminals do: lines that are too wide are folded, and the cursor stays with its letter."""
        lines, cursor = self.lines, self._screen.cursor
        rows: list[str] = []
        for y, line in enumerate(lines):
            if y == cursor.y:
                x, below = min(cursor.x, width * max(1, -(-len(line) // width)) - 1), len(rows)
            rows += [line[at : at + width] for at in range(0, max(len(line), 1), width)]
        self._start(width)
        self.feed("\r\n".join(rows))
        self._screen.cursor.y, self._screen.cursor.x = below + x // width, x % width
        self._screen.cursor.hidden = cursor.hidden


class _Rows(pyte.Screen):
    def cursor_up(self, count: int | None = None) -> None:
        assert self.cursor.y >= (count or 1), "the cursor went above the first line"
        super().cursor_up(count)

    def erase_in_display(self, how: int = 0, *arguments: object, **keywords: object) -> None:
        assert (self.cursor.x, self.cursor.y) != (0, 0), "tmux takes an erased whole screen into its history"
        super().erase_in_display(how, *arguments, **keywords)


def environment(**variables: str) -> dict[str, str]:
    """Return an environment in which only `variables` decide about the output."""
    decisive = {"CI", "SLURM_JOB_ID", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES"}
    kept = {name: value for name, value in os.environ.items() if name not in decisive}
    return {**kept, "TERM": "xterm-256color", **variables}


class Terminal:
    """A script that runs in a terminal of its own, or with a pipe. Warnings are errors in it.

    Args:
        script: Python code. It runs in a fork of a process that has imported Cadenza, torch and rich.
        width: The columns; None for a pipe instead of a terminal.
        height: The rows.
        variables: Environment variables about the output. Others of this kind are not set.
    """

    def __init__(
        self, script: str, width: int | None = 100, height: int = 30, variables: Mapping[str, str] | None = None
    ) -> None:
        self.exit_code: int | None = None
        self._bytes = bytearray()
        self._ours, theirs = os.pipe() if width is None else pty.openpty()
        if width is not None:
            self.resize(width, height)
        self._forks = _forks()
        request = {"script": script, "environment": environment(**(variables or {}))}
        socket.send_fds(self._forks, [json.dumps(request).encode()], [theirs])
        os.close(theirs)
        self.pid = int(self._forks.recv(100))

    @property
    def written(self) -> str:
        """All that the script has written so far."""
        return self._bytes.decode(errors="ignore")

    def resize(self, width: int, height: int = 30) -> None:
        """Change the size of the window. The script receives SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        """Send keys, such as ``"\x03"`` for Ctrl-C."""
        os.write(self._ours, keys.encode())

    def read_until(self, pattern: str, timeout_s: float = 300.0) -> str:
        """Read until the pattern is in what the script wrote since the last call; return that text up to now."""
        begin, until = len(self.written), time.monotonic() + timeout_s
        while not re.search(pattern, self.written[begin:]):
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come; the script wrote {self.written!r}")
        return self.written[begin:]

    def read_for(self, seconds: float) -> None:
        """Read for some time, or until the script ends."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._read(left):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            os.kill(self.pid, 9)
        while self._read(300.0):
            pass
        self.exit_code = int(self._forks.recv(100))
        os.close(self._ours)

    def _read(self, timeout_s: float) -> bool:
        """Read a part; return whether there was one."""
        if not select.select([self._ours], [], [], max(timeout_s, 0))[0]:
            return False
        try:
            part = os.read(self._ours, 1 << 16)
        except OSError:  # Linux raises this when the other end is closed
            part = b""
        self._bytes += part
        return bool(part)


def shown_in_terminal(script: str, *, width: int = 100, variables: Mapping[str, str] | None = None) -> tuple[Screen, str]:
    """Run a Python script in a terminal of its own; return what is on the screen at its end, and all that was written."""
    with Terminal(script, width, variables=variables) as terminal:
        pass
    return Screen(terminal.written, width), terminal.written


@cache
def _forks() -> socket.socket:
    """Start the process that forks. It ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("forking.py")), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # before the wait
    return ours


def shown_by_a_new_process(script: str, width: int = 100) -> tuple[Screen, str]:
    """Do as `shown_in_terminal`, without a fork: for scripts that fork while another thread writes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    command = [sys.executable, "-W", "error", "-c", script]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True)
    os.close(theirs)
    written = bytearray()
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):  # Linux raises this when the other end is closed
        while part := terminal.read(4096):
            written += part
    process.wait(timeout=300)
    return Screen(written.decode(), width), written.decode()
