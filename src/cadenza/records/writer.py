"""One thread for all calls that may block, so that the training never waits for a disk or a server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from cadenza.records.record import Audio, Histogram, Image, Media, Record, Text

if TYPE_CHECKING:
    from cadenza.run import Run

C = TypeVar("C", bound="Channel")

_GATHER_S = 0.1  # records are written together: to wake a thread for each would cost a tiny step as much again
HANGS_S = 10.0
"""A call that takes longer, in seconds, gets a thread of its own."""
_END_HANGS_S = 1.0  # the same at the end of a run, where all wait
CAPACITY = 10_000
"""The most records that wait for a sink, if they are small."""
_RECORD = 10_000  # bytes of pictures and sounds that take as much room as a record of numbers


def writer_of(run: Run) -> Writer:
    """Return the thread in which the sinks of a run write."""
    return run._session.metrics.writer


class Writer:
    """A thread, started when it is first needed, that serves its channels one after the other.

    It is a daemon, so a server that never answers does not keep the process from ending. If one channel hangs, a second thread
    serves the others.
    """

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._asked, self._hurried = Event(), Event()
        self._ends: list[tuple[Channel, Callable[[], object], str]] = []
        self._stopped = False
        self.clock: Callable[[], float] = time.monotonic
        """Returns seconds: when a sink that failed is tried again."""
        self.ended: float | None = None
        """When the run ended, as `time.monotonic` returns it; None while it goes on."""
        self._serving: list[Any] | None = None
        """The channel that the thread serves, and since when; empty while it waits. Each thread has a list of its own."""

    def channel(self, write: Callable[[Sequence[Record]], object], capacity: int | None = None) -> Channel:
        """Return a channel that calls `write` in the thread. It holds at most `capacity` records, fewer if they are large."""
        return self.add(Channel(self, write, CAPACITY if capacity is None else capacity))

    def add(self, channel: C) -> C:
        """Serve a channel from now on."""
        self._channels.append(channel)
        return channel

    def ask(self, channel: Channel, *, hurry: bool = False) -> None:
        """Serve `channel` soon; with `hurry`, do not gather more records first."""
        if hurry:
            self._hurried.set()
        serving = tuple(self._serving or ())
        limit = HANGS_S if self.ended is None else min(HANGS_S, _END_HANGS_S)
        if self._serving is None or (serving and serving[0] is not channel and time.monotonic() - serving[1] > limit):
            self._serving = []
            Thread(target=self._work, args=(self._serving,), name="cadenza-writer", daemon=True).start()
        if not self._asked.is_set():
            self._asked.set()

    def close_at_end(self, channel: Channel, close: Callable[[], object], name: str) -> None:
        """Call `close` in the thread when the run ends, after the last record of `channel`. `name` is shown while it waits."""
        self._ends.append((channel, close, name))

    def end(self) -> float:
        """Close all channels of `close_at_end`, once and without waiting. Return the time of the first call."""
        if self.ended is None:
            self.ended = time.monotonic()
            for channel, close, _ in self._ends:
                channel.ask_close(close)
        return self.ended

    def leave(self, channel: Channel) -> float:
        """Close one channel of `close_at_end` before the run ends, without waiting. Return the time."""
        for one in [one for one in self._ends if one[0] is channel]:
            self._ends.remove(one)
            channel.ask_close(one[1])
        return time.monotonic()

    def hurry(self) -> None:
        """Serve the channels that are not closed. If one of them hangs, another thread serves the others."""
        for channel in self._channels:
            if not channel.over:
                self.ask(channel, hurry=True)

    @property
    def busy(self) -> list[str]:
        """The names of the channels that the end of the run waits for."""
        return [name for channel, _, name in self._ends if not channel.over]

    def stop(self) -> None:
        """End the thread after the work that it was given; does not wait for it."""
        self._stopped = True
        self._hurried.set()
        self._asked.set()

    def _work(self, serving: list[Any]) -> None:
        while self._serving is serving and not self._stopped:  # else another thread has taken over
            self._asked.wait(min((due for one in self._channels if (due := one.due_in_s) is not None), default=None))
            self._hurried.wait(_GATHER_S)
            self._hurried.clear()
            self._asked.clear()  # before the channels are served: a record that is put from now on asks again
            for channel in self._channels:
                if self._serving is serving:
                    serving[:] = channel, time.monotonic()
                    channel.serve()
                    serving.clear()


class Channel:
    """The records of one sink on their way to the writer thread, in order."""

    def __init__(self, writer: Writer, write: Callable[[Sequence[Record]], object], capacity: int) -> None:
        self._writer, self._write, self._capacity = writer, write, capacity
        self._waiting: deque[Record] = deque()
        self._put = self._written = 0  # sizes in all; each is changed in one thread alone, so no lock is needed
        self._close: Callable[[], Any] | None = None
        self._closed = Event()
        self._error: Exception | None = None
        self._broken = False
        self._served = Lock()
        self.missed: int = 0
        """Records that were not taken, because so many were waiting already."""
        self.events: deque[BaseException | str] = deque()
        """Errors that began an outage, and sentences about its end, for the thread of the training."""

    @property
    def over(self) -> bool:
        """Whether it is closed; false as well while its last call does not come to an end."""
        return self._closed.is_set()

    def missing(self) -> int:
        """Return the number of records that the target does not have."""
        return self.missed

    @property
    def due_in_s(self) -> float | None:
        """The time in seconds until it must be served, if it is not asked for; None: it need not be."""
        return None

    def put(self, record: Record) -> bool:
        """Queue a record. Return False if the queue is full, and the record is left out.

        Raises:
            Exception: The error of an earlier record in the thread; once.
        """
        if self._error is not None:
            self._raise()
        if self._put - self._written >= self._capacity:
            self.missed += 1
            return False
        self._put += size_of(record)
        self._waiting.append(record)
        # Each time: this call notices that the thread hangs in another channel.
        self._writer.ask(self, hurry=self._put - self._written > self._capacity // 2)
        return True

    def ask_close(self, close: Callable[[], object]) -> None:
        """Request that the thread writes the waiting records, then calls `close`: once, also after an error."""
        self._close = close
        self._writer.ask(self, hurry=True)

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
            self._writer.hurry()  # if a channel hangs, a new thread takes over
            if wait is not None and slice_s > _END_HANGS_S:
                wait(left)
            slice_s = min(2 * slice_s, HANGS_S)
        self._raise()

    def serve(self) -> None:
        """Write the waiting records, then close if that was asked for. If another thread is in this method, it does both."""
        while (self._waiting or self._close) and self._served.acquire(blocking=False):
            try:
                close = self._close  # read before the records: if it is set, the records that wait now are the last ones
                records = [self._waiting.popleft() for _ in range(len(self._waiting))]
                try:
                    if records and not self._broken:
                        self._write(records)
                except BaseException as error:  # also sys.exit(): it must not end this thread
                    self._break(error)
                self._written += sum([size_of(record) for record in records])
                if close is not None:
                    self._end(close)
            finally:
                self._served.release()

    def _end(self, close: Callable[[], object]) -> None:
        try:
            close()
        except BaseException as error:
            self._break(error)
        self._close = None
        self._closed.set()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _break(self, error: BaseException) -> None:
        if self._broken:  # the first error is the cause; closing what broke often fails as well
            return
        self._error, self._broken = as_exception(error), True


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
