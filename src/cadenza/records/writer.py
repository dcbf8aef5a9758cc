"""One thread for all calls that may block, so that the training never waits for a disk or a server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from cadenza.records.record import Audio, Histogram, Image, Media, Record, Text

if TYPE_CHECKING:
    from cadenza.run import Run

_GATHER_S = 0.1  # records are written together: to wake a thread for each would cost a tiny step as much again
_HANGS_S = 10.0  # a call that takes longer gets a thread of its own
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
        self._stopped = False
        self._serving: list[Any] | None = None
        """The channel that the thread serves, and since when; empty while it waits. Each thread has a list of its own."""

    def channel(self, write: Callable[[Sequence[Record]], object], capacity: int = 10_000) -> Channel:
        """Return a channel that calls `write` in the thread. It holds at most `capacity` records, fewer if they are large."""
        self._channels.append(Channel(self, write, capacity))
        return self._channels[-1]

    def ask(self, channel: Channel, *, hurry: bool = False) -> None:
        """Serve `channel` soon; with `hurry`, do not gather more records first."""
        if hurry:
            self._hurried.set()
        serving = tuple(self._serving or ())
        if self._serving is None or (serving and serving[0] is not channel and time.monotonic() - serving[1] > _HANGS_S):
            self._serving = []
            Thread(target=self._work, args=(self._serving,), name="cadenza-writer", daemon=True).start()
        if not self._asked.is_set():
            self._asked.set()

    def stop(self) -> None:
        """End the thread after the work that it was given; does not wait for it."""
        self._stopped = True
        self._hurried.set()
        self._asked.set()

    def _work(self, serving: list[Any]) -> None:
        while self._serving is serving and not self._stopped:  # else another thread has taken over
            self._asked.wait()
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

    @property
    def over(self) -> bool:
        """Whether it is closed; false as well while its last call does not come to an end."""
        return self._closed.is_set()

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
        self._put += _size(record) if record.media else 1
        self._waiting.append(record)
        # Each time: this call notices that the thread hangs in another channel.
        self._writer.ask(self, hurry=self._put - self._written > self._capacity // 2)
        return True

    def finish(self, close: Callable[[], Any], timeout_s: float) -> None:
        """Write the waiting records, then call `close`, both in the thread.

        Args:
            close: Called once, also after an error.
            timeout_s: How long to wait, in seconds; no more than 10 if it is broken.

        Raises:
            TimeoutError: It took longer; it goes on in the thread, as long as the process lives.
            Exception: What went wrong in the thread.
        """
        self._close = close
        timeout_s = min(timeout_s, _HANGS_S) if self._broken else timeout_s
        deadline = time.monotonic() + timeout_s
        self._writer.ask(self, hurry=True)
        while not self._closed.wait(min(max(deadline - time.monotonic(), 0.0), _HANGS_S)):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the last records were not written within {timeout_s:g} s")
            self._writer.ask(self, hurry=True)  # if another channel hangs, a new thread takes over
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
                self._written += sum([_size(record) if record.media else 1 for record in records])
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
        if not isinstance(error, Exception):
            error, cause = RuntimeError(f"it asked for an end by {error!r}"), error
            error.__cause__ = cause
        self._error, self._broken = error, True


def _size(record: Record) -> int:
    return 1 + sum(map(_bytes, record.media.values())) // _RECORD


def _bytes(medium: Media) -> int:
    match medium:
        case Image(tensor) | Audio(tensor) | Histogram(tensor):
            return tensor.nbytes
        case Text(text):
            return len(text)
    return 0
