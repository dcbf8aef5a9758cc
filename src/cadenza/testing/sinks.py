"""The requirements on every sink."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event

import torch

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.hooks.moments import Callback
from cadenza.hooks.subscription import Subscription, on
from cadenza.records.reading import read_records
from cadenza.records.record import Audio, Histogram, Image, Record, Text
from cadenza.run import Run
from cadenza.sinks.sink import Sink
from cadenza.status.decisions import Outcome
from cadenza.status.run_info import RunInfo
from cadenza.testing.contracts import check_callback
from cadenza.testing.tiny import tiny_trainer

Values = Mapping[str, Sequence[tuple[int, float]]]


def check_sink(factory: Callable[[], Sink], read: Callable[[RunInfo], Values]) -> None:
    """Check the requirements on every sink, in runs with a directory.

    - Each number of each record arrives at its step. `read` reads them back.
    - Images, sounds, histograms and texts are written or left out; they are no fault.
    - If the run fails, the numbers logged before the error arrive.
    - A run that failed and continues at a checkpoint has each number once.
    - After an outage, in which `write` fails once, each number is there once: also those of earlier calls of `write`, if the
      `close` of the default `abandon` fails as well.
    - All that `check_callback` checks.

    Args:
        factory: Returns a new instance.
        read: A function of the facts of a run (``info.directory``, ``info.id``) that opens what the sink wrote, and returns the
            pairs ``(step, value)`` of each name.

    Raises:
        AssertionError: A requirement is not met. The message says which.

    >>> from cadenza.records import read_records
    >>> from cadenza.sinks import JsonLines
    >>> def values(info):
    ...     found = {}
    ...     for record in read_records(Path(info.directory, "copy.jsonl")):
    ...         for name, value in record.values.items():
    ...             found.setdefault(name, []).append((record.step, value))
    ...     return found
    >>> check_sink(lambda: JsonLines("copy.jsonl"), values)
    """
    with tempfile.TemporaryDirectory() as folder:
        _check_whole(factory(), read, Path(folder, "whole"))
        _check_continued(factory, read, Path(folder, "continued"))
        _check_outage(factory(), read, Path(folder, "outage"))
    check_callback(factory)


def _check_whole(sink: Sink, read: Callable[[RunInfo], Values], directory: Path) -> None:
    run = tiny_trainer(callbacks=[_log, _log_media, sink], directory=directory, steps=5).fit()
    _check_faults(run, "a run with numbers and media")
    _compare(run.info, read, "in a whole run")


def _check_continued(factory: Callable[[], Sink], read: Callable[[RunInfo], Values], directory: Path) -> None:
    def trainer(*more: Subscription) -> Run:
        checkpoint = Checkpoint(every="2 steps")
        return tiny_trainer(callbacks=[_log, checkpoint, factory(), *more], directory=directory, steps=8).fit(resume="auto")

    @on(Callback.on_step_end, at=5)
    def fail(run: Run) -> None:
        infos.append(run.info)
        raise _FailureOnPurposeError

    infos: list[RunInfo] = []
    try:
        trainer(fail)
    except _FailureOnPurposeError:
        _compare(infos[0], read, "after an error in step 5")
    run = trainer()
    _check_faults(run, "a run that continues")
    _compare(run.info, read, "in a run that continues at step 4 and had logged step 5 before")


def _check_outage(sink: Sink, read: Callable[[RunInfo], Values], directory: Path) -> None:
    if sink.on_fault != "retry":
        return
    write, close, arrived, failed = sink.write, sink.close, Event(), Event()
    failures = ["write", *(["close"] if type(sink).abandon is Sink.abandon and not sink._package else [])]

    def fail_once(what: str) -> None:
        if arrived.is_set() and what in failures:
            failures.remove(what)
            failed.set()
            raise ConnectionError("an outage on purpose")

    def write_or_fail(records: Sequence[Record]) -> None:
        fail_once("write")
        write(records)
        arrived.set()

    def close_or_fail(outcome: Outcome | None) -> None:
        if outcome is None:
            fail_once("close")
        close(outcome)

    @on(Callback.on_step_end)
    def wait(run: Run) -> None:
        if run.progress.step in (3, 5):
            (arrived if run.progress.step == 3 else failed).wait(sink.patience_s)

    own = vars(sink)
    own.update(write=write_or_fail, close=close_or_fail)
    run = tiny_trainer(callbacks=[_log, wait, sink], directory=directory, steps=6).fit()
    _compare(run.info, read, "after an outage (a return of write means that the target has the records)")


class _FailureOnPurposeError(Exception):
    pass


@on(Callback.on_step_end)
def _log(run: Run) -> None:
    step = run.progress.step
    run.log({"check/double": 2.0 * step, "check/half": step / 2})
    if step % 2:
        run.log("odd", 1)


@on(Callback.on_step_end, at=2)
def _log_media(run: Run) -> None:
    media = {"image": Image(torch.zeros(3, 4, 4)), "sound": Audio(torch.zeros(8), 8000)}
    run.log({**media, "histogram": Histogram(torch.arange(4.0)), "text": Text("a text"), "beside": 0.5})


def _check_faults(run: Run, where: str) -> None:
    assert not run.faults, f"the sink failed in {where}: {run.faults[0].error!r}"


def _compare(info: RunInfo, read: Callable[[RunInfo], Values], where: str) -> None:
    assert info.directory is not None
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(info.directory / "metrics.jsonl"):
        for name, value in record.values.items():
            expected.setdefault(name, []).append((record.step, value))
    found = read(info)
    for name, pairs in expected.items():
        there = [(step, value) for step, value in found.get(name, ())]
        assert there == pairs, f"{where}, {name!r} must be {pairs}; read gives {there}"
