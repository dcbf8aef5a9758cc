"""The text files of a run directory: lines that are appended, and the files of other ranks than the main process."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from logging import Logger, getLogger
from pathlib import Path
from threading import Lock, RLock, Timer, current_thread
from typing import Self

from cadenza.status.masking import masked_text

logger: Logger = getLogger("cadenza")

GATHER_S = 0.25
"""A line of a `GatheredLog` that comes within this time after others, in seconds, waits as long, to be written with more."""
LONGEST_S = 1.0
"""The longest time in seconds that such a line waits while further lines come, also if the thread does not run."""
_WAIT_S = 2.0  # how long a text of another rank waits for the same one of the main process
_LAST_WAIT_S = 0.2  # the same at the end of the run
_KNOWN = 4096  # so many of the main process's last lines are compared
_LARGEST_READ = 2**20  # bytes


class Log:
    """A file to which lines are appended, each readable at once. On a full disk, lines wait in memory and the run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._ended = False
        self.waiting: bytes = b""

    def add(self, line: str) -> None:
        """Append a line."""
        self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        warned = bool(self.waiting)
        self.waiting += text.encode(errors="backslashreplace")
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            while self.waiting:
                self.waiting = self.waiting[self._file.write(self.waiting) :]
        except OSError as error:
            if not warned:
                logger.warning("%s cannot be written, its lines wait in memory and the run goes on: %r", self._path, error)
        if self._ended:  # run.print after the fit
            self.end()

    def flush(self) -> None:
        """Write the lines that wait."""
        if self.waiting:
            self._write("")

    def reopen(self) -> None:
        """Close the file. The next line opens the file that is at the path then."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def end(self) -> None:
        """Close the file, now and after each later line."""
        self._ended = True
        self.reopen()


class GatheredLog(Log):
    """A log of which a thread writes the lines, many at once, if they come often: for a line in every step.

    A line that comes `GATHER_S` or more after the last write is written at once. Other lines wait for the thread. If the
    process is killed (``SIGKILL``, a crash in native code), the lines of the last `GATHER_S` may be lost, and in no case
    a line that came more than `LONGEST_S` before the last one. `flush` writes all lines; `end` does so too. The thread ends
    when it has written. The interpreter waits for it when it exits, so that a run that was never ended loses no line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.at_once: bool = False
        """Whether each line is written at once."""
        self._lines: deque[Callable[[], str]] = deque()
        self._written_at = -math.inf
        self._writing = RLock()
        self._timer: Timer | None = None

    def add(self, line: str) -> None:
        self.gather(lambda: line)

    def gather(self, make: Callable[[], str]) -> None:
        """Append the line that a function returns. The thread calls it: many in a row take less time than each in a step."""
        self._lines.append(make)
        since = time.monotonic() - self._written_at
        if since > (GATHER_S if self._timer is None else LONGEST_S) or self.at_once or self._ended:
            self.flush()
        elif self._timer is None:
            self._timer = Timer(GATHER_S, self._write_later)
            self._timer.name = "cadenza-records"
            try:
                self._timer.start()
            except RuntimeError:  # the interpreter exits
                self._timer = None
                self.flush()

    def flush(self) -> None:
        """Write the lines that wait. May be called from any thread."""
        with self._writing:
            self._written_at = time.monotonic()
            lines = [f"{self._lines.popleft()()}\n" for _ in range(len(self._lines))]
            if lines or self.waiting:
                self._write("".join(lines))

    def reopen(self) -> None:
        with self._writing:
            super().reopen()

    def end(self) -> None:
        timer = self._timer
        if timer is not None:
            timer.cancel()
        self.flush()
        with self._writing:
            super().end()
        if timer is not None and timer is not current_thread():
            timer.join()

    def _write_later(self) -> None:
        self.flush()
        self._timer = None
        if self._lines:  # one came in between, and saw this thread
            self.flush()


class RankLog:
    """The log of a rank that is not the main process: the texts that the main process does not write as well.

    A text waits for about two seconds, and is written unless ``console.log`` has its lines by then. No messages are needed for
    this. Where ``console.log`` cannot be read, such as on a machine with its own disk, each text is written.

    Args:
        path: The file, which is made with the first text.
        main: The ``console.log`` of the main process. Lines that it has now are not compared.
    """

    @classmethod
    def of(cls, directory: Path | None, rank: int) -> Self | None:
        """Return the log of a rank, such as ``console.rank3.log``; None on the main process and without a directory."""
        return None if directory is None or rank == 0 else cls(directory / f"console.rank{rank}.log", directory / "console.log")

    def __init__(self, path: Path, main: Path) -> None:
        self._path, self._main, self._log = path, main, Log(path)
        self._offset = _size(main)
        self._known: dict[bytes, None] = {}
        self._waiting: list[tuple[float, str]] = []
        self._ended, self._lock = False, Lock()
        self._log.end()  # the file is open while it is written only

    def add(self, text: str) -> None:
        """Keep a text. May be called from any thread."""
        with self._lock:
            self._waiting.append((time.monotonic() + (0.0 if self._ended else _WAIT_S), masked_text(text)))
        if self._waiting[0][0] <= time.monotonic():
            self.write_due()

    def write_due(self, *, ends: bool = False) -> None:
        """Write the texts that have waited; with `ends` all of them, now and after each later text."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while ends and self._differing() and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._ended |= ends
            self._read_main()
            now = time.monotonic()
            while self._waiting and (self._ended or self._waiting[0][0] <= now):
                self._write(self._waiting.pop(0)[1])

    def _differing(self) -> bool:
        with self._lock:
            self._read_main()
            return any(not self._is_known(text) for _, text in self._waiting)

    def _is_known(self, text: str) -> bool:
        return all(line in self._known for line in _encoded(text).split(b"\n"))

    def _read_main(self) -> None:
        """Read the lines that the main process has written since."""
        if not self._waiting:
            return
        with suppress(OSError), self._main.open("rb") as file:
            file.seek(max(self._offset, _size(self._main) - _LARGEST_READ))
            lines, _, cut = file.read().rpartition(b"\n")
            self._offset = file.tell() - len(cut)
            self._known |= dict.fromkeys(lines.split(b"\n"))
        for line in [*self._known][:-_KNOWN]:
            del self._known[line]

    def _write(self, text: str) -> None:
        if self._is_known(text):
            return
        with suppress(OSError):  # `Log` warns about the line
            self._path.parent.mkdir(parents=True, exist_ok=True)  # another machine may not have the directory
        self._log.add(text)


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
