"""The base class of sinks with a target that may be slow, full or unreachable."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from cadenza.errors import CadenzaError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.records.record import Figure
from cadenza.records.writer import Channel, writer_of
from cadenza.status.counting import counted

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo


class Sink(Callback):
    """Base of sinks that write records in the writer thread of the run. A step only queues its record, and never waits.

    A subclass defines `open`, `write` and `close`, which ``cadenza replay`` uses as well. An error disables the sink with one
    warning, and the run continues. ``metrics.jsonl`` still has every record.

    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> class Memory(Sink):
    ...     def open(self, info):
    ...         self.values = []
    ...
    ...     def write(self, records):
    ...         self.values += [(record.step, record.values["lr"]) for record in records]
    ...
    ...     def close(self, outcome):
    ...         self.values.append(outcome.kind)
    >>> @on(Callback.on_step_end, every=2)
    ... def log(run):
    ...     run.log("lr", 0.1)
    >>> memory = Memory()
    >>> run = tiny_run(callbacks=[log, memory], steps=4)
    >>> memory.values
    [(2, 0.1), (4, 0.1), 'finished']
    """

    on_fault: Literal["raise", "disable"] = "disable"

    patience_s: float = 120.0
    """The longest time in seconds that the end of a run waits for the last records; at most 10 s after a signal."""

    _channel: Channel | None = None

    def __init__(self) -> None:
        self.remarks: deque[str] = deque()
        """Remarks for the user. A sink adds them in any thread; the thread of the training issues them as warnings."""

    @abstractmethod
    def open(self, info: RunInfo) -> None:
        """Open the target, before the first step. Called on the main process only.

        Raises:
            CadenzaError: An argument is wrong; this ends the run. Any other error only disables the sink.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write the records since the last call. Called in the writer thread.

        A `Figure` arrives as an `Image`, drawn when it was logged.
        """

    @abstractmethod
    def close(self, outcome: Outcome | None) -> None:
        """Close the target, also after an error. Called in the writer thread, after the last record."""

    def on_fit_start(self, run: Run) -> None:
        self.on_fault = "disable"
        if self._channel is not None and not self._channel.over:
            raise RuntimeError("the sink is still closing its last run. Make a new sink for this run.")
        self._channel = None
        if run.is_main:
            try:
                self.open(run.info)
            except CadenzaError:
                self.on_fault = "raise"
                raise
            self._channel = writer_of(run).channel(self.write)
            run.at_end(partial(self._finish, run, self._channel))

    def on_log(self, run: Run, record: Record) -> None:
        if self.remarks:
            self._tell(run)
        if self._channel is None:  # it failed to start or is closed, and the run is ending
            return
        taken = self._channel.put(_drawn(record) if record.media else record)
        if not taken and self._channel.missed == 1:
            self.remarks.append(
                f"the sink is too slow and its queue is full: records are left out, the first at step {record.step}"
            )

    def _finish(self, run: Run, channel: Channel) -> None:
        if channel.missed:
            replay = ". cadenza replay can write them from metrics.jsonl" * bool(run.info.directory)
            self.remarks.append(f"the sink was too slow, and {counted(channel.missed, 'record')} were left out{replay}")
        hurried = run.outcome is not None and run.outcome.kind in ("preempted", "interrupted")
        try:
            channel.finish(partial(self.close, run.outcome), min(self.patience_s, 10.0) if hurried else self.patience_s)
        finally:
            self._channel = None if channel.over else channel
            self._tell(run)

    def _tell(self, run: Run) -> None:
        """Issue the remarks as warnings."""
        while self.remarks:
            run.warn(f"{hooks_of(run).name_of(self)}: {self.remarks.popleft()}")


def _drawn(record: Record) -> Record:
    """Return a record with its figures drawn, in the thread that made them and before they change."""
    media = {name: medium.drawn() if isinstance(medium, Figure) else medium for name, medium in record.media.items()}
    return replace(record, media=media)
