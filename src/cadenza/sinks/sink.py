"""The base class of sinks with a target that may be slow, full or unreachable."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import uuid4

from cadenza.errors import CadenzaError, MissingExtraError
from cadenza.hooks.dispatch import Fault, hooks_of
from cadenza.hooks.moments import Callback
from cadenza.records.record import drawn
from cadenza.records.writer import Channel, Rows, writer_of
from cadenza.status.decisions import decide
from cadenza.status.formats import counted

M = TypeVar("M")
if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo


class Sink(Callback):
    """Base of sinks that write records in a writer thread. A step only queues its record, and never waits.

    A subclass defines `open`, `write` and `close`, which ``cadenza replay`` uses as well. ``on_fault`` says what an error does:

    - ``"retry"``, the default: one warning, and the run continues. The sink is opened again after 1, 2, 4, ... seconds, at most
      5 min. It then writes what it missed, from ``metrics.jsonl``, each record once and in order. Without a directory, the
      first 10,000 records of the outage wait in memory. A run that is continued sends the records that were missed before.
    - ``"disable"``: one warning, and the run continues without the sink.
    - ``"raise"``: the error ends the run.

    With multiple ranks: ``open``, ``write`` and ``close`` are called on the main process only, so they must not communicate.

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

    on_fault: Literal["raise", "disable", "retry"] = "retry"

    patience_s: float = 120.0
    """The longest time in seconds that the end of a run waits for the last records; at most 10 s after a signal. All sinks of
    a run wait during the same time."""

    _may_retry = True
    _package = _extra = ""
    """The package that it needs, and the extra of Cadenza that installs it."""
    _writes_now = False
    """Whether the thread of the training writes, unless earlier records wait: if this costs less than to queue a record."""
    _channel: Channel | None = None
    _has_until: int | None = None
    """The step that the target had in the run that is continued, if it was behind."""

    def __init__(self) -> None:
        if self._package and find_spec(self._package) is None:
            raise MissingExtraError(self._package, needed_by=type(self).__name__, extra=self._extra or self._package)
        self.remarks: deque[str] = deque()
        """Remarks for the user. A sink adds them in any thread; the thread of the training issues them as warnings."""

    @abstractmethod
    def open(self, info: RunInfo) -> None:
        """Open the target, before the first step. Called on the main process only.

        With ``on_fault = "retry"`` it is called again after an error, in the writer thread. Then `info.continued` is true, and
        the records after `info.step` are written again: as for a run that continues, drop what the target has of them.

        Raises:
            CadenzaError: An argument is wrong; before the first step this ends the run. ``on_fault`` says what any other
                error does.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write the records since the last call. Called in the writer thread.

        A return means that the target has these records: none of them is given again, whatever fails later. A sink that sends
        several calls together must not return before they are sent, or must keep the others where `open` finds it.

        A `Figure` arrives as an `Image`, drawn when it was logged.
        """

    @abstractmethod
    def close(self, outcome: Outcome | None) -> None:
        """Close the target, also after an error. Called in the writer thread, after the last record."""

    def abandon(self) -> None:
        """Release a target that failed, before `open` is called again; an error is ignored. The default calls `close`."""
        self.close(None)

    def state_dict(self) -> dict[str, Any]:
        behind = self._has_until if self._channel is None else self._channel.position()
        return {} if behind is None else {"has_until": behind}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._has_until = state.get("has_until")

    def on_fit_start(self, run: Run) -> None:
        if self._channel is not None and not self._channel.over:
            raise RuntimeError("the sink is still closing its last run. Make a new sink for this run.")
        self._channel, has_until, self._has_until = None, self._has_until, None
        if not run.is_main:
            return
        if self.on_fault == "retry":
            self._channel = self._begin(run, has_until)
        else:
            self.open(run.info)
            self._channel = self._channel_to(run)
        run.at_end(partial(self._finish, run, self._channel))

    def on_log(self, run: Run, record: Record) -> None:
        channel = self._channel
        if self.remarks or (channel is not None and channel.events):
            self._tell(run, channel, "on_log")
        if channel is None:  # it failed to start or is closed, and the run is ending
            return
        taken = channel.put(drawn(record) if record.media else record)
        if not taken and channel.missed == 1:
            self.remarks.append(
                f"the sink is too slow and its queue is full: records are left out, the first at step {record.step}"
            )

    def _channel_to(self, run: Run, reopen: Callable[[int], object] | None = None, rows: Rows | None = None) -> Channel:
        writer, name, now = writer_of(run), hooks_of(run).name_of(self), self._writes_now
        close, step = lambda: self.close(run.outcome), run.info.step
        return Channel(writer, self.write, close, name, reopen=reopen, rows=rows, step=step, now=now)

    def _begin(self, run: Run, has_until: int | None) -> Channel:
        """Open the target, and return the channel that opens it again after an error."""
        info, files = run.info, run._session.files
        if not info.id:  # a tracker finds its run by the id when it is opened again
            info = replace(info, id=uuid4().hex)
        if has_until is not None and has_until < info.step and files is not None:
            info = replace(info, step=has_until)
        opened = False

        def reopen(step: int) -> None:
            nonlocal opened
            if files is not None:
                files.flush_records()  # `open` reads the records up to this step
            if opened:
                with suppress(Exception):
                    self.abandon()
            self.open(replace(info, step=step, continued=info.continued or opened))
            opened = True

        channel = self._channel_to(run, reopen, None if files is None else Rows(files))
        if info.step < run.info.step:
            channel.continue_at(info.step)
        try:
            self.open(info)
            opened = True
        except CadenzaError:
            channel.is_open = False
            raise
        except Exception as error:
            channel.fail(error)
            self._tell(run, channel, "on_fit_start")
        return channel

    def _finish(self, run: Run, channel: Channel) -> None:
        hurried = run.outcome is not None and run.outcome.kind in ("preempted", "interrupted")
        patience_s = min(self.patience_s, 10.0) if hurried else self.patience_s
        try:
            if run.outcome is None:  # it leaves the run before the end
                channel.ask_close()
            since = None if run.outcome is None else writer_of(run).end()
            channel.finish(patience_s, since=since, wait=partial(_say_who_is_busy, run))
        finally:
            self._channel = None if channel.over else channel
            self._tell(run, channel, "at_end")
            if missing := channel.missing():
                self._tell_missing(run, missing)

    def _tell(self, run: Run, channel: Channel | None, where: str) -> None:
        """Issue the remarks as warnings, and report outages and their ends."""
        name = hooks_of(run).name_of(self)
        while channel is not None and channel.events:
            event = channel.events.popleft()
            if isinstance(event, Exception):
                run._session.report(Fault(name, where, event, run.progress.now(), retried=True))
            else:
                run.warn(f"{name} works again: {event}")
                decide(run, "recovered", str(event), who=name)
        while self.remarks:
            run.warn(f"{name}: {self.remarks.popleft()}")

    def _tell_missing(self, run: Run, missing: int) -> None:
        them = "it" if missing == 1 else "them"
        replay = f". metrics.jsonl has {them}, and cadenza replay can write {them}" * bool(run.info.directory)
        why = f"{counted(missing, 'record')} did not reach it{replay}"
        decide(run, "not sent", why, who=hooks_of(run).name_of(self), data={"records": missing})
        run.warn(f"{hooks_of(run).name_of(self)}: {why}")


def checked_mode(mode: M, modes: Sequence[str]) -> M:
    """Return the mode of a tracker.

    Raises:
        ValueError: It is neither None nor one of `modes`.
    """
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be {', '.join(map(repr, modes))} or None; got {mode!r}")
    return mode


def _say_who_is_busy(run: Run, left_s: float) -> None:
    """Show which sinks the end of the run waits for."""
    run.print(f"waiting up to {left_s:.0f} s for the last records of {', '.join(writer_of(run).busy)}")
