"""A channel that tries again after an error, and then sends what its sink missed."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from cadenza.files.disk import open_regular
from cadenza.records import writer as writing
from cadenza.records.reading import record_in
from cadenza.records.record import Record
from cadenza.records.writer import Channel, Writer, as_exception, size_of
from cadenza.status.counting import counted

if TYPE_CHECKING:
    from cadenza.run import Run

FIRST_S, LONGEST_S = 1.0, 300.0
"""The shortest and the longest time between two attempts, in seconds."""
_SLICE = 1000  # records; so many are read from the file and sent at once


class Backoff:
    """When to try again: 1 s after the first failure, then after twice as long each time, at most 5 min.

    The delay starts again at 1 s when the target has worked for longer than the last delay.

    Args:
        clock: Returns seconds.

    >>> now = 0.0
    >>> backoff = Backoff(lambda: now)
    >>> backoff.failed(), backoff.failed(), backoff.failed()
    (1.0, 2.0, 4.0)
    >>> backoff.worked()
    >>> now = 3.0
    >>> backoff.failed()
    11.0
    >>> backoff.worked()
    >>> now = 60.0
    >>> backoff.failed()
    61.0
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._delay = 0.0
        self._works_since: float | None = None
        self.due: float = 0.0
        """The time of the next attempt."""

    def failed(self) -> float:
        """Return the time of the next attempt after a failure."""
        now = self._clock()
        if self._works_since is not None and now - self._works_since > self._delay:
            self._delay = 0.0
        self._works_since = None
        self._delay = min(max(2 * self._delay, FIRST_S), LONGEST_S)
        self.due = now + self._delay
        return self.due

    def worked(self) -> None:
        """Note that the target works again."""
        self._works_since = self._clock()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of ``metrics.jsonl``: those before a run started or continued, and those that it has added since."""

    path: Path
    start: int
    """The length of the file in bytes when the run started or continued."""
    flush: Callable[[], object]
    """Writes the rows that wait in memory."""

    @classmethod
    def of(cls, run: Run) -> Rows | None:
        """Return the rows of a run from now on; None if it writes none."""
        files = run._session.files
        return (
            None
            if files is None
            else cls(files.path / "metrics.jsonl", files.offsets().get("metrics.jsonl", 0), files.flush_records)
        )

    def read(self, after: int | None, skip: int, count: int) -> Iterator[tuple[int, str]]:
        """Yield rows with their numbers; the first row that the run added has number 1.

        Args:
            after: Only rows of later steps, also from before the run. None: all rows that it added.
            skip: The number of added rows to leave out.
            count: The number of the last row. Later rows are still on their way to the sink.
        """
        self.flush()
        if not self.path.exists():
            return
        with open_regular(self.path) as file:
            if after is None:
                file.seek(self.start)
            position, number = file.tell(), 0
            for line in file:
                number += position >= self.start
                position += len(line)
                if number > count or not line.endswith(b"\n"):
                    return
                if number and number <= skip:
                    continue
                if after is None or _step_of(line) > after:
                    yield number, line[:-1].decode(errors="replace")


class RecoveringChannel(Channel):
    """A channel that opens its target again after an error. It then writes what the target missed, in order.

    With `rows`, what does not fit into the queue, or came during an outage, is read back from the file. Without, it waits in
    the queue, which is bounded.

    Args:
        writer: The writer thread.
        write: Writes records.
        reopen: Opens the target again. The argument is a step: the target has all records up to this step, and may have a
            part of the later ones, which are written again.
        rows: The rows of the run; None if it writes none.
        step: The step at which the run starts or continues.
        now: Write each record in the thread of the training, unless earlier ones wait.
        capacity: The longest queue.
    """

    missed: int

    def __init__(
        self,
        writer: Writer,
        write: Callable[[Sequence[Record]], object],
        reopen: Callable[[int], object],
        *,
        rows: Rows | None,
        step: int,
        now: bool = False,
        capacity: int | None = None,
    ) -> None:
        super().__init__(writer, write, writing.CAPACITY if capacity is None else capacity)
        self._reopen, self._rows, self._now = reopen, rows, now
        self._lock = Lock()
        self._backoff = Backoff(lambda: writer.clock())
        self._sent = step
        self._last: list[Record] = []
        """The records that were written last and have the same step: another one of this step may follow."""
        self._sending: list[Record] = []
        self._sends_since = 0.0
        self._behind = self._reads = False
        """Whether records must be read back from the file, and whether they are now."""
        self._again = False
        """Whether they are read by step, also those from before the run. Otherwise by number."""
        self._count = self._taken = 0
        """The records that were put, and those of them that the target has."""
        self._media: dict[str, Record] = {}
        self._media_size = 0
        self.down: bool = False
        """Whether the last attempt failed."""
        self.is_open: bool = True
        """Whether the target is open, so that it must be closed."""

    # -- in the thread of the training -------------------------------------------------------------

    def continue_at(self, step: int) -> None:
        """Send what the sink missed before the run was continued: all records after `step`."""
        if self._rows is not None:
            self._sent, self._behind, self._again = step, True, True
            self._writer.ask(self)

    def fail(self, error: BaseException) -> None:
        """Note an error of the first `open`: the channel tries again."""
        self.is_open = False
        self._failed(error)
        self._writer.ask(self)

    def put(self, record: Record) -> bool:
        """Queue a record. Return False if the queue is full, the run has no file of records, and the record is left out."""
        if self._now and self._put_now(record):
            return True
        with self._lock:
            self._count += 1
            if not self._behind and self._put - self._written < self._capacity:
                self._put += size_of(record)
                self._waiting.append(record)
            elif self._rows is None:
                self.missed += 1
                return False
            else:
                self._behind = True
                self._keep(record)
        self._writer.ask(self, hurry=self._put - self._written > self._capacity // 2)
        return True

    def _put_now(self, record: Record) -> bool:
        """Write a record in this thread, and return True; or return False if earlier ones wait."""
        if self.down or self._behind or self._waiting or not self._served.acquire(blocking=False):
            return False
        try:
            self._count += 1
            self._begin([record])
            self._send([record], self._count)
        except Exception as error:
            self._failed(error)
            self._writer.ask(self)
        finally:
            self._served.release()
        return True

    def position(self) -> int | None:
        """Return the last step that the target has for certain, if it is behind; None if it is not."""
        with self._lock:
            hangs = bool(self._sending) and time.monotonic() - self._sends_since > writing.HANGS_S
            if not (self.down or self._behind or self._reads or hangs):
                return None
            waiting = [*self._sending[:1], *islice(self._waiting, 1), *self._last[:1]]
            return self._sent if self._again or not waiting else waiting[0].step - 1

    def missing(self) -> int:
        """Return the number of records that the target does not have, or not for certain."""
        with self._lock:
            if self._rows is None:
                return len(self._sending) + len(self._waiting) + self.missed
            if not self._again:
                return self._count - self._taken
            arguments = self._sent, self._taken, self._count
        return sum(1 for _ in self._rows.read(*arguments))

    # -- in the writer thread ----------------------------------------------------------------------

    @property
    def due_in_s(self) -> float | None:
        """The time in seconds until the next attempt; None if there is none to wait for."""
        return max(self._backoff.due - self._writer.clock(), 0.0) if self.down and not self.over else None

    def serve(self) -> None:
        """Write what waits, after another attempt to open the target if it failed and the time has come; then close."""
        while self._has_work() and self._served.acquire(blocking=False):
            try:
                close = self._close  # read before the records: if it is set, the records that wait now are the last ones
                try:
                    self._send_all(whole=close is not None)
                except BaseException as error:  # also sys.exit(): it must not end this thread
                    self._failed(error)
                if close is not None:
                    self._end(close if self.is_open else lambda: None)
            finally:
                self._served.release()

    def _has_work(self) -> bool:
        if self.over:
            return False
        if self._close is not None:
            return True
        if self.down:
            return self._writer.clock() >= self._backoff.due
        return bool(self._waiting or self._behind)

    def _send_all(self, *, whole: bool) -> None:
        was_down, recovers, count, first = self.down, self.down or self._again, 0, self._sent
        if was_down:
            self.is_open = False
            self._reopen(first)
            self.is_open = True
        while True:
            behind, sent = self._behind, self._send_waiting()
            if behind:
                sent += self._send_rows()
            count += sent
            if not (whole and sent):
                break
        if was_down:
            self.down = False
            self._backoff.worked()
        if recovers and (count or was_down):
            records = f"{counted(count, 'record')} after step {max(first, 0)} went to it"
            self.events.append(records if count else "it missed no record")

    def _send_waiting(self) -> int:
        with self._lock:
            records = [*self._waiting]
            self._waiting.clear()
            self._begin(records)
        if records:
            self._send(records, self._taken + len(records))
            with self._lock:
                self._written += sum(map(size_of, records))
        return len(records)

    def _send_rows(self) -> int:
        """Send the rows that the sink missed. Records that are put from now on wait in the queue."""
        assert self._rows is not None, "only with a file a channel is behind"
        with self._lock:
            self._behind, self._reads, until = False, True, self._count
        rows = self._rows.read(self._sent if self._again else None, self._taken, until)
        count = 0
        while part := [*islice(rows, _SLICE)]:
            records = [record for _, line in part if (record := self._media.get(line) or record_in(line)) is not None]
            with self._lock:
                self._begin(records)
            if records:
                self._send(records, part[-1][0])
            count += len(records)
        with self._lock:
            self._taken, self._again, self._reads = until, False, False
        return count

    def _begin(self, records: list[Record]) -> None:
        self._sending, self._sends_since = records, time.monotonic()

    def _send(self, records: list[Record], taken: int) -> None:
        self._write(records)
        with self._lock:
            step = records[-1].step
            same = [record for record in records if record.step == step]
            self._last = [*self._last, *same] if len(same) == len(records) and self._step_of_last == step else same
            self._sending, self._taken = [], taken
            if self._again:
                self._sent = step - 1
            if self._media:
                for record in records:
                    self._media_size -= size_of(record) if self._media.pop(record.to_json(), None) else 0

    @property
    def _step_of_last(self) -> int | None:
        return self._last[0].step if self._last else None

    def _failed(self, error: BaseException) -> None:
        if not self.down:
            self.events.append(as_exception(error))
        with self._lock:
            self.down = True
            if self._sending or self._reads:
                self._take_back()
        self._backoff.failed()

    def _take_back(self) -> None:
        """Note that the records of a failed call are not sent. The whole step of the first one is sent again."""
        begun = self._sending or self._last
        first = begun[0].step if begun else self._sent + 1
        pending = [*(self._last if self._step_of_last == first else ()), *self._sending, *self._waiting]
        self._sent, self._sending, self._last, self._reads = first - 1, [], [], False
        if self._rows is None:
            self._waiting = deque(pending)
            self._put, self._written = sum(map(size_of, pending)), 0
            return
        self._waiting.clear()
        self._put = self._written = self._taken = 0
        self._behind = self._again = True
        for record in pending:
            self._keep(record)

    def _keep(self, record: Record) -> None:
        """Keep the media of a record that is read back later: the file has none."""
        if record.media and self._media_size < self._capacity:
            self._media[record.to_json()] = record
            self._media_size += size_of(record)


def _step_of(line: bytes) -> int:
    """Return the step of a row; -1 if it cannot be read."""
    try:  # rows have this form; decoding all of them would take many times as long
        return int(line.split(b'"step": ', 1)[1].split(b",", 1)[0])
    except (IndexError, ValueError):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError):
            return -1
