"""Threads for all calls that may block, so that the training never waits for a disk or a server."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from cadenza.files.disk import open_regular
from cadenza.records.reading import record_in
from cadenza.records.record import Audio, Histogram, Image, Media, Record, Text
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.records.directory import RunDirectory
    from cadenza.run import Run

_GATHER_S = 0.1  # records are written together: to wake a thread for each would cost a tiny step as much again
HANGS_S = 10.0
"""A call that takes longer, in seconds, may never come back."""
_FLUSH_S = 2.0  # the longest wait before a save
_END_HANGS_S = 1.0  # the same at the end of a run, where all wait
FIRST_S, LONGEST_S = 1.0, 300.0
"""The shortest and the longest time between two attempts to open a target again, in seconds."""
CAPACITY = 10_000
"""The most records that wait for a sink, if they are small."""
_RECORD = 10_000  # bytes of pictures and sounds that take as much room as a record of numbers
_SLICE = 1000  # records; so many are read from the file and sent at once


def writer_of(run: Run) -> Writer:
    """Return the channels to the threads in which the sinks of a run write."""
    return run._session.metrics.writer


class Writer:
    """The channels of a run. Each has a thread of its own, so that none waits for another one that hangs."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        """The channels, in the order in which they were made."""
        self.clock: Callable[[], float] = time.monotonic
        """Returns seconds: when a sink that failed is tried again."""
        self.ended: float | None = None
        """When the run ended, as `time.monotonic` returns it; None while it goes on."""

    def flush(self) -> None:
        """Wait for the records that were put so far, at most 2 seconds, so that a kill loses none. Any thread may call it."""
        wanted, until = [(channel, channel.count) for channel in self.channels], time.monotonic() + _FLUSH_S
        for channel in self.channels:
            channel.hurry()
        while any(channel.lacks(count) for channel, count in wanted) and time.monotonic() < until:
            time.sleep(0.005)

    def end(self) -> float:
        """Close all channels that have a name, once and without waiting. Return the time of the first call."""
        if self.ended is None:
            self.ended = time.monotonic()
            for channel in self.channels:
                if channel.name:
                    channel.ask_close()
        return self.ended

    @property
    def busy(self) -> list[str]:
        """The names of the channels that the end of the run waits for."""
        return [channel.name for channel in self.channels if channel.name and not channel.over]

    def stop(self) -> None:
        """End the threads after the work that they were given; does not wait for it."""
        for channel in self.channels:
            channel.stop()


class Channel:
    """The records of one sink on their way to its thread, in order.

    The thread is started when it is first needed. It is a daemon, so a server that never answers does not keep the process from
    ending.

    The records that are put are numbered from 1. The target has the first ones, the next ones wait in the queue, and the rest,
    which did not fit into it, is read back from the rows of the run. Without rows, what does not fit is left out.

    After an error, the target is opened again with `reopen`, and gets the whole step of the first record that failed. A channel
    without `reopen` is broken by its first error, and raises it.

    Args:
        writer: The channels of the run, to which this one is added.
        write: Writes records, in the thread.
        close: Closes the target, in the thread, after the last record; not if the target is not open.
        name: The end of the run waits for a channel with a name, and shows it.
        reopen: Opens the target again. The argument is a step: the target has all records up to this step, and may have a
            part of the later ones, which are written again.
        rows: The rows of the run; None if it writes none.
        step: The step at which the run starts or continues.
        now: Write each record in the thread of the training, unless earlier ones wait.
    """

    def __init__(
        self,
        writer: Writer,
        write: Callable[[Sequence[Record]], object],
        close: Callable[[], object] = lambda: None,
        name: str = "",
        *,
        reopen: Callable[[int], object] | None = None,
        rows: Rows | None = None,
        step: int = 0,
        now: bool = False,
    ) -> None:
        self._writer, self._write, self._close, self._reopen = writer, write, close, reopen
        self._rows, self._now = rows, now
        self.name: str = name
        self._waiting: deque[Record] = deque()
        self._size = 0  # of the records in the queue
        self.count: int = 0
        """The number of records that were put."""
        self._taken = 0  # those of them that the target has
        self._media: dict[int, Record] = {}  # by number, records with media that did not fit into the queue
        self._last: list[Record] = []  # that were written last and have the same step: another one of this step may follow
        self._sent = step  # the target has all records up to this step
        self._continues = False  # whether the target lacks records of an earlier process
        self._sends_since: float | None = None
        self._delay = self._due = 0.0
        self._works_since = math.inf
        self._lock, self._served = Lock(), Lock()
        self._asked, self._hurried = Event(), Event()
        self._thread: Thread | None = None
        self._stops = False
        self._closes, self._closed = False, Event()
        self._error: Exception | None = None
        self.down: bool = False
        """Whether the last attempt failed."""
        self.is_open: bool = True
        """Whether the target is open, so that it must be closed."""
        self.missed: int = 0
        """Records that were not taken, because so many were waiting already."""
        self.events: deque[BaseException | str] = deque()
        """Errors that began an outage, and sentences about its end, for the thread of the training."""
        writer.channels.append(self)

    # -- in the thread of the training -------------------------------------------------------------

    def continue_at(self, step: int) -> None:
        """Send what the sink missed before the run was continued: all records after `step`."""
        if self._rows is not None:
            self._sent, self._continues, self.count = step, True, self._rows.go_back(step)
            self._ask()

    def fail(self, error: BaseException) -> None:
        """Note an error of the first `open`: the channel tries again."""
        self.is_open = False
        self._fail(error)

    def put(self, record: Record) -> bool:
        """Queue a record. Return False if the queue is full, the run has no file of records, and the record is left out.

        Raises:
            Exception: The error that broke the channel; once.
        """
        with self._lock:
            fits = self._size < CAPACITY and not self._behind
            if not fits and self._rows is None:
                self.missed += 1
                return False
            self.count += 1
            if fits:
                self._waiting.append(record)
                self._size += size_of(record)
            elif record.media and sum(map(size_of, self._media.values())) < CAPACITY:
                self._media[self.count] = record  # the file has no media
        if self._now and not self.down and self.count - self._taken == 1:
            self.serve()
        else:
            if self._size > CAPACITY // 2:
                self.hurry()
            self._ask()
        self._raise()
        return True

    def position(self) -> int | None:
        """Return the last step that the target has for certain, if it is behind; None if it is not."""
        with self._lock:
            hangs = self._sends_since is not None and time.monotonic() - self._sends_since > HANGS_S
            if self._reopen is None or not (self.down or self._behind or self._continues or hangs):
                return None
            return self._waiting[0].step - 1 if self._waiting else self._sent

    def lacks(self, count: int) -> bool:
        """Return whether the target does not have the first `count` records, and may have them soon."""
        return self._taken < count and not self.down and not self.over

    def missing(self) -> int:
        """Return the number of records that the target does not have, or not for certain."""
        return self.missed + (0 if self._reopen is None else self.count - self._taken)

    def ask_close(self) -> None:
        """Request that the thread writes the waiting records, then closes the target: once, also after an error."""
        self._closes = True
        self.hurry()
        self._ask()

    def hurry(self) -> None:
        """Do not gather more records before the next write."""
        self._hurried.set()

    def stop(self) -> None:
        """End the thread after the work that it was given; does not wait for it."""
        self._stops = True
        self.hurry()
        self._asked.set()

    def finish(self, timeout_s: float, *, since: float | None = None, wait: Callable[[float], object] | None = None) -> None:
        """Wait until it is closed, after `ask_close`.

        Args:
            timeout_s: How long to wait, in seconds; no more than 10 if it is broken.
            since: The begin of this time, as `time.monotonic` returns it; None: now.
            wait: Called with the seconds that are left each time it has waited for some seconds.

        Raises:
            TimeoutError: It took longer; it goes on in the thread, as long as the process lives.
            Exception: What went wrong in the thread.
        """
        timeout_s = min(timeout_s, HANGS_S) if self._broken else timeout_s
        deadline = (time.monotonic() if since is None else since) + timeout_s
        slice_s = _END_HANGS_S
        while not self._closed.wait(min(max(deadline - time.monotonic(), 0.0), slice_s)):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the last records were not written within {timeout_s:g} s")
            if wait is not None and slice_s > _END_HANGS_S:
                wait(left)
            slice_s = min(2 * slice_s, HANGS_S)
        self._raise()

    def _ask(self) -> None:
        """Have the thread write soon."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="cadenza-writer", daemon=True)
            self._thread.start()
        if not self._asked.is_set():
            self._asked.set()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- in both threads ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether it is closed; false as well while its last call does not come to an end."""
        return self._closed.is_set()

    @property
    def _behind(self) -> bool:
        """Whether records must be read back from the file."""
        return self._taken + len(self._waiting) < self.count

    @property
    def _broken(self) -> bool:
        return self.down and self._reopen is None

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while not (self.over or self._stops):
            self._asked.wait(self.due_in_s)
            self._hurried.wait(_GATHER_S)
            self._hurried.clear()
            self._asked.clear()  # before the records are written: one that is put from now on asks again
            self.serve()

    @property
    def due_in_s(self) -> float | None:
        """The time in seconds until it must be served: until the next attempt, or 0 if it has work; None without work."""
        if self.over or self._closes:
            return None if self.over else 0.0
        if self.down:
            return None if self._broken else max(self._due - self._writer.clock(), 0.0)
        return 0.0 if self._taken < self.count else None

    def serve(self) -> None:
        """Write what waits, and close if that was asked for. If another thread is in this method, it does both."""
        while self.due_in_s == 0.0 and self._served.acquire(blocking=False):
            try:
                closes = self._closes  # read before the records: if it is set, the records that wait now are the last ones
                try:
                    if not self._broken:
                        self._send_all()
                except BaseException as error:  # also sys.exit(): it must not end this thread
                    self._fail(error)
                if closes:
                    self._end()
            finally:
                self._served.release()

    def _send_all(self) -> None:
        """Write the records that were put so far. If the target failed, open it again first."""
        was_down, first, until, count = self.down, self._sent, self.count, 0
        if was_down:
            self._open_again()
        while self._taken < until:
            if not self._waiting:
                self._read_back()
            count += self._send()
        if was_down or self._continues:
            self._note_recovery(first, count, was_down=was_down)

    def _open_again(self) -> None:
        assert self._reopen is not None, "else it is broken"
        self.is_open = False
        self._reopen(self._sent)
        self.is_open = True

    def _note_recovery(self, first: int, count: int, *, was_down: bool) -> None:
        """Note that the target has all records, of which it missed so many after a step."""
        if was_down or count:
            records = f"{counted(count, 'record')} after step {max(first, 0)} went to it"
            self.events.append(records if count else "it missed no record")
        if was_down:
            self.down, self._works_since = False, self._writer.clock()
        self._continues = False

    def _send(self) -> int:
        """Write the records in the queue, and return their number."""
        with self._lock:
            records = [*self._waiting]
        if records:
            self._sends_since = time.monotonic()
            self._write(records)
            with self._lock:
                for record in records:
                    self._size -= size_of(record)
                    self._waiting.popleft()
                step = records[-1].step
                self._taken, self._sent, self._sends_since = self._taken + len(records), step - 1, None
                self._last = [record for record in (*self._last, *records) if record.step == step]
        return len(records)

    def _read_back(self) -> None:
        """Fill the queue with rows that did not fit into it, if it is empty."""
        with self._lock:
            until = self._taken if self._waiting else min(self.count, self._taken + _SLICE)
        if until == self._taken or self._rows is None:  # a record has just been put
            return
        records = []
        for number, row in self._rows.read(self._taken, until):
            with self._lock:
                record = self._media.pop(number, None)
            record = record or record_in(row)
            if record is not None:
                records.append(record)
        with self._lock:
            self._waiting.extend(records)
            self._size += sum(map(size_of, records))
            self._taken = until - len(records)  # rows that cannot be read count as taken

    def _fail(self, error: BaseException) -> None:
        """Note an error. If the target can be opened again, queue the whole step of the first record that failed."""
        if self._reopen is None:
            self._error = self._error if self.down else as_exception(error)  # the first error is the cause
            self.down = True
            return
        if not self.down:
            self.events.append(as_exception(error))
        with self._lock:
            self.down, self._sends_since = True, None
            if self._waiting:
                step = self._waiting[0].step
                again = [record for record in self._last if record.step == step]
                self._waiting.extendleft(reversed(again))
                self._size += sum(map(size_of, again))
                self._taken, self._sent, self._last = self._taken - len(again), step - 1, []
        now = self._writer.clock()
        if now - self._works_since > self._delay:  # it had worked for longer than the last delay
            self._delay = 0.0
        self._works_since = math.inf
        self._delay = min(max(2 * self._delay, FIRST_S), LONGEST_S)
        self._due = now + self._delay
        self._ask()

    def _end(self) -> None:
        try:
            if self.is_open:
                self._close()
        except BaseException as error:
            if not self._broken:  # closing what broke often fails as well
                self._error = as_exception(error)
        self._closed.set()


class Rows:
    """Reads the rows of ``metrics.jsonl`` that a run adds. They are numbered from 1.

    Args:
        files: The run directory. Rows that it holds already are not read, unless `go_back` says so.
    """

    def __init__(self, files: RunDirectory) -> None:
        self._files, self._path = files, files.path / "metrics.jsonl"
        self._offset, self._number = files.offsets().get("metrics.jsonl", 0), 0  # of the last row that was read

    def go_back(self, step: int) -> int:
        """Begin with the rows after a step, which an earlier process wrote, and return their number."""
        end, self._offset, position, count = self._offset, 0, 0, 0
        with suppress(FileNotFoundError), open_regular(self._path) as file:
            for line in file:
                if position >= end:
                    break
                position += len(line)
                count += 1
                if _step_of(line) <= step:
                    self._offset, count = position, 0
        return count

    def read(self, after: int, until: int) -> list[tuple[int, str]]:
        """Return the rows after a number and up to another one, with their numbers. Each row can be read once, in order."""
        rows = []
        self._files.flush_records()
        with suppress(FileNotFoundError), open_regular(self._path) as file:
            file.seek(self._offset)
            while self._number < until and (line := file.readline()).endswith(b"\n"):
                self._offset, self._number = self._offset + len(line), self._number + 1
                if self._number > after:
                    rows.append((self._number, line[:-1].decode(errors="replace")))
        return rows


def _step_of(line: bytes) -> int:
    """Return the step of a row; -1 if it cannot be read."""
    try:  # rows have this form; decoding all of them would take many times as long
        return int(line.split(b'"step": ', 1)[1].split(b",", 1)[0])
    except (IndexError, ValueError):
        return -1 if (record := record_in(line)) is None else record.step


def as_exception(error: BaseException) -> Exception:
    """Return an error that cannot end the process: a package may call ``sys.exit``."""
    if isinstance(error, Exception):
        return error
    replacement = RuntimeError(f"it asked for an end by {error!r}")
    replacement.__cause__ = error
    return replacement


def size_of(record: Record) -> int:
    """Return how much room a record takes in a queue: 1, and more with large media."""
    return 1 + sum(map(_bytes, record.media.values())) // _RECORD if record.media else 1


def _bytes(medium: Media) -> int:
    match medium:
        case Image(tensor) | Audio(tensor) | Histogram(tensor):
            return tensor.nbytes
        case Text(text):
            return len(text)
    return 0
