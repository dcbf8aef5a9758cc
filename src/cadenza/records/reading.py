"""Read the records and decisions of a run, also of one in progress or killed: an incomplete last line is skipped."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from cadenza.files.disk import open_regular
from cadenza.records.record import Record
from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters

_COUNTERS = ("epoch", "step", "batch", "samples")
_LATEST_S = 253_370_764_800.0  # the year 9999
_WRONG = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


def read_records(path: Path, *, broken: list[int] | None = None, names: Collection[str] | None = None) -> Iterator[Record]:
    """Yield the records of a ``metrics.jsonl``, in the order in which they were written; none if there is no file.

    Args:
        path: The file.
        broken: The numbers of lines that cannot be read are appended to it. An incomplete last line is not one of them:
            the run still writes it, or was killed.
        names: Only records with a value of one of these names, and the last record. The rest is skipped without decoding,
            so this is many times faster; lines that cannot be read may be skipped too.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(directory=tempfile.mkdtemp(), callbacks=[LogTraining(every="2 steps", throughput=False)])
    >>> [(record.step, list(record.values)) for record in read_records(run.info.directory / "metrics.jsonl")]
    [(2, ['train/loss', 'train/lr']), (4, ['train/loss', 'train/lr'])]
    """
    for number, line in _lines(path, broken, names):
        try:
            yield _record(line)
        except _WRONG:
            _note(broken, number)


class NewRecords:
    """Reads a ``metrics.jsonl`` while it grows: each `read` goes on where the last one ended.

    A run that is continued cuts its file and repeats the steps after its checkpoint; those that were read are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: int = 0
        """Lines that cannot be read."""
        self._offset, self._end = 0, b""
        self._last = self._known = -1

    def read(self) -> Iterator[Record]:
        """Yield the new records. An incomplete last line is left for the next call."""
        if not self.path.exists():
            return
        with open_regular(self.path) as file:
            file.seek(self._offset - len(self._end))
            if file.read(len(self._end)) != self._end:  # it was cut, and may have grown again
                self._offset, self._known = file.seek(0), self._last
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset, self._end = self._offset + len(line), line
                try:
                    record = _record(json.loads(line))
                except (AttributeError, *_WRONG):
                    self.broken += 1
                    continue
                if record.step > self._known:
                    self._last = record.step
                    yield record


def read_decisions(path: Path, *, broken: list[int] | None = None) -> Iterator[Decision]:
    """Yield the decisions of a ``decisions.jsonl``, oldest first; none if there is no file.

    Args:
        path: The file.
        broken: The numbers of lines that cannot be read are appended to it, as in `read_records`.

    >>> import tempfile
    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> enough = on(Callback.on_step_end, at=3)(lambda run: run.stop("enough"))
    >>> run = tiny_run(directory=tempfile.mkdtemp(), callbacks=[enough])
    >>> [(one.what, one.why, one.when.step) for one in read_decisions(run.info.directory / "decisions.jsonl")]
    [('stopped', 'enough', 3)]
    """
    for number, line in _lines(path, broken):
        try:
            what, who, why = (str(line.pop(name)) for name in ("what", "who", "why"))
            data = line.pop("data", {})
            if not isinstance(data, dict):
                raise TypeError("data is no object")
            yield Decision(what, who, why, Counters(**{name: count_in(value) for name, value in line.items()}), data)
        except _WRONG:
            _note(broken, number)


def record_in(line: str) -> Record | None:
    """Return the record of one line; None if it cannot be read."""
    try:
        return _record(json.loads(line))
    except (AttributeError, *_WRONG):
        return None


def _record(line: dict[str, Any]) -> Record:
    epoch, step, batch, samples = (count_in(line.pop(name)) for name in _COUNTERS)
    tokens = count_in(line.pop("tokens", 0))  # written if they are counted
    when = time_in(line.pop("time"))
    for name, value in line.items():
        if type(value) is float:  # most are
            continue
        if not isinstance(value, int | float | str):
            raise TypeError("a value is no number")
        number = float(value)  # a whole number may be too large for one
        line[name] = number if isinstance(value, str) else value
    return Record(Counters(epoch=epoch, step=step, batch=batch, samples=samples, tokens=tokens), when, line)


def count_in(value: Any) -> int:
    """Return a counter that was read from a file.

    Raises:
        TypeError, ValueError, OverflowError: It is no number, negative, or does not fit into 64 bits.
    """
    count = int(value)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"a counter must be at least 0 and fit into 64 bits; got {count}")
    return count


def time_in(value: Any) -> float:
    """Return a time that was read from a file, in seconds since 1970.

    Raises:
        TypeError, ValueError, OverflowError: It is no number, or in no year that a calendar shows.
    """
    seconds = float(value)
    if not 0 <= seconds < _LATEST_S:
        raise ValueError(f"a time must be a number of seconds from 1970 to 9999; got {seconds}")
    return seconds


def _lines(path: Path, broken: list[int] | None, names: Collection[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1) if names is None else _lines_with(names, file):
            try:
                content = json.loads(line)
                if not isinstance(content, dict):
                    raise ValueError("no object")
            except (ValueError, RecursionError):  # also bytes that are not UTF-8
                if line.endswith(b"\n"):
                    _note(broken, number)
                continue
            yield number, content


def _lines_with(names: Collection[str], file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that may hold one of these names, and the last complete line, with their numbers."""
    keys = [json.dumps(name).encode() for name in names]
    skipped: tuple[int, bytes] | None = None
    for number, line in enumerate(file, 1):
        if any(key in line for key in keys):
            skipped = None
            yield number, line
        elif line.endswith(b"\n"):
            skipped = number, line
    if skipped is not None:
        yield skipped


def _note(broken: list[int] | None, number: int) -> None:
    if broken is not None:
        broken.append(number)
