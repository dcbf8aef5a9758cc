"""One thread for all that may block, so that the training never waits for a disk or a server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Any

from cadenza.records.record import Audio, Histogram, Image, Media, Record, Text

_GATHER_S = 0.1  # records are written together: to wake a thread for each would cost a tiny step as much again
_HANGS_S = 10.0  # a call that takes longer gets a thread of its own
_RECORD = 10_000  # bytes of pictures and sounds that take as much room as a record of numbers


class Writer:
    """A thread, started when it is first needed, that serves its channels one after the other.

    It is a daemon: a server that never answers shall not keep the process from ending. Nor shall it keep the other channels
    waiting: a second thread takes them over.
    """

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.asked, self.hurried = Event(), Event()
        self.stopped = False
        self._worker: _Worker | None = None

    def channel(self, write: Callable[[Sequence[Record]], object], capacity: int = 10_000) -> Channel:
        """Return a way to have `write` called with records; it holds at most `capacity` of them, fewer if they are large."""
        self.channels.append(Channel(self, write, capacity))
        return self.channels[-1]

    def ask(self, channel: Channel, *, hurry: bool = False) -> None:
        """Have `channel` served soon; with `hurry` without waiting for more."""
        if hurry:
            self.hurried.set()
        worker = self._worker
        if worker is None or worker.hangs_elsewhere(channel):
            if worker is not None:
                worker.replaced = True
            self._worker = _Worker(self)
        if not self.asked.is_set():
            self.asked.set()

    def stop(self) -> None:
        """End the thread when it has done what it was asked; does not wait for it."""
        self.stopped = True
        self.hurried.set()
        self.asked.set()


class _Worker:
    def __init__(self, writer: Writer) -> None:
        self.replaced = False
        self._serving: tuple[Channel, float] | None = None
        Thread(target=self._work, args=(writer,), name="cadenza-writer", daemon=True).start()

    def hangs_elsewhere(self, channel: Channel) -> bool:
        serving = self._serving
        return serving is not None and serving[0] is not channel and time.monotonic() - serving[1] > _HANGS_S

    def _work(self, writer: Writer) -> None:
        while not (self.replaced or writer.stopped):
            writer.asked.wait()
            writer.hurried.wait(_GATHER_S)
            writer.hurried.clear()
            writer.asked.clear()  # before they are served: what is put from now on asks again
            for channel in writer.channels:
                if not self.replaced:
                    self._serving = channel, time.monotonic()
                    channel.serve()
                    self._serving = None


class Channel:
    """The way of one sink's records to the writer thread, in order."""

    def __init__(self, writer: Writer, write: Callable[[Sequence[Record]], object], capacity: int) -> None:
        self._writer, self._write, self._capacity = writer, write, capacity
        self._waiting: deque[Record] = deque()
        self._put = self._written = 0  # sizes in all; each is changed in one thread alone, so no lock is needed
        self._close: Callable[[], Any] | None = None
        self._closed = Event()
        self._error: Exception | None = None
        self._broken = False
        self._served = Lock()
        self.missed = 0
        """Records that were not taken, because so many were waiting already."""

    @property
    def over(self) -> bool:
        """Whether it is closed; false as well while its last call does not come to an end."""
        return self._closed.is_set()

    def put(self, record: Record) -> bool:
        """Take a record on its way; costs one put. Returns false if so much is waiting that it is left out.

        Raises:
            Exception: What an earlier record met in the thread; once.
        """
        if self._error is not None:
            self._raise()
        if self._put - self._written >= self._capacity:
            self.missed += 1
            return False
        self._put += _size(record)
        self._waiting.append(record)
        # Each time: should the thread hang in another channel meanwhile, this is where it is noticed.
        self._writer.ask(self, hurry=self._put - self._written > self._capacity // 2)
        return True

    def finish(self, close: Callable[[], Any], timeout_s: float) -> None:
        """Write what is waiting, then call `close`, both in the thread.

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
        """Do what there is to do, in the calling thread; nothing if another thread is at it, which then does it."""
        while (self._waiting or self._close) and self._served.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._served.release()

    def _serve(self) -> None:
        close = self._close  # before the records: those that are there now are the last ones, if it is set
        records: list[Record] = []
        while self._waiting:
            records.append(self._waiting.popleft())
        if records and not self._broken:
            self._guarded(lambda: self._write(records))
        self._written += sum(map(_size, records))
        if close is not None:
            self._guarded(close)
            self._close = None
            self._closed.set()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._break(error)
        except BaseException as error:  # somebody's sys.exit() is no end for this thread
            broken = RuntimeError(f"it asked for an end by {error!r}")
            broken.__cause__ = error
            self._break(broken)

    def _break(self, error: Exception) -> None:
        if not self._broken:  # the first one says what is wrong; closing what broke often fails as well
            self._error, self._broken = error, True


def _size(record: Record) -> int:
    return 1 + sum(map(_bytes, record.media.values())) // _RECORD if record.media else 1


def _bytes(medium: Media) -> int:
    match medium:
        case Image(tensor) | Audio(tensor) | Histogram(tensor):
            return tensor.nbytes
        case Text(text):
            return len(text)
    return 0
