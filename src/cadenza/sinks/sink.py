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

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo


class Sink(Callback):
    """Takes records somewhere, in the run's writer thread: a step pays for one put, and never waits.

    A subclass says how to open, write and close; ``cadenza replay`` uses the same three. An error disables the sink, with one
    report, and the run goes on: ``metrics.jsonl`` has every record all the same.
    """

    on_fault: Literal["raise", "disable"] = "disable"

    patience_s = 120.0
    """How long the end of a run waits for the last records to be written, in seconds; at most 10 s after a signal."""

    _channel: Channel | None = None

    def __init__(self) -> None:
        self.remarks: deque[str] = deque()
        """What the user should know; a sink adds to it in any thread, and the training's thread shows it."""

    @abstractmethod
    def open(self, info: RunInfo) -> None:
        """Get ready, before the first step; on the main process only.

        Raises:
            CadenzaError: The user gave something wrong; this ends the run. Any other error only disables the sink.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write these records: all that came since the last time. Called in the writer thread.

        A `Figure` comes as the `Image` that it was when it was logged.
        """

    @abstractmethod
    def close(self, outcome: Outcome | None) -> None:
        """Let go of everything, also of what broke. Called in the writer thread, after the last record."""

    def on_fit_start(self, run: Run) -> None:
        self.on_fault = "disable"
        if self._channel is not None and not self._channel.over:
            raise RuntimeError("it still hangs in the end of its last run: make a new one for this run")
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
        if self._channel is None:  # it could not start, or is closed, and these are the last records before the run ends
            return
        taken = self._channel.put(_drawn(record) if record.media else record)
        if not taken and self._channel.missed == 1:
            self.remarks.append(
                f"it is too slow: so much is waiting that records are left out, the first at step {record.step}"
            )

    def _finish(self, run: Run, channel: Channel) -> None:
        if channel.missed:
            replay = "; cadenza replay takes them there from metrics.jsonl" * bool(run.info.directory)
            self.remarks.append(f"it was too slow, and {channel.missed} records did not get there{replay}")
        hurried = run.outcome is not None and run.outcome.kind in ("preempted", "interrupted")
        try:
            channel.finish(partial(self.close, run.outcome), min(self.patience_s, 10.0) if hurried else self.patience_s)
        finally:
            self._channel = None if channel.over else channel
            self._tell(run)

    def _tell(self, run: Run) -> None:
        while self.remarks:
            run.warn(f"{hooks_of(run).name_of(self)}: {self.remarks.popleft()}")


def _drawn(record: Record) -> Record:
    """Return a record with its figures drawn: in the thread that made them, and before they change again."""
    media = {name: medium.drawn() if isinstance(medium, Figure) else medium for name, medium in record.media.items()}
    return replace(record, media=media)
