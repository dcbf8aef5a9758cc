"""Read the records and decisions of a run, also of one in progress or killed: an incomplete last line is skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cadenza.files.disk import open_regular
from cadenza.records.record import Record
from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters

T = TypeVar("T")
Numbers = tuple[int, int, int, int, int]
"""Epoch, step, batch, samples and tokens."""
Row = tuple[Numbers, float, dict[str, float]]
Parse = Callable[[bytes | str], Any]
_LARGEST = (1 << 63) - 1
_EXACT = float(1 << 63)
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
    return map(_record, read_values(path, broken=broken, names=names))


def read_values(path: Path, *, broken: list[int] | None = None, names: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the counters, the time and the values of each record, as `read_records` does, but in half the time."""
    lines = _lines(path) if names is None else _lines_with(names, _lines(path))
    return _parsed(lines, partial(_row, parse=_parser()), broken)


def read_rows(path: Path, parse: Callable[[Any], T], *, broken: list[int] | None = None) -> Iterator[T]:
    """Yield what `parse` returns for the content of each line of JSON; nothing if there is no file.

    Args:
        path: The file.
        parse: Raises `LookupError`, `TypeError`, `ValueError` or `OverflowError` for a line of another form.
        broken: The numbers of lines that cannot be read are appended to it, as in `read_records`.
    """
    return _parsed(_lines(path), lambda line: parse(json.loads(line)), broken)


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
                record = record_in(line)
                if record is None:
                    self.broken += 1
                elif record.step > self._known:
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
    return read_rows(path, _decision, broken=broken)


def record_in(line: bytes | str) -> Record | None:
    """Return the record of one line; None if it cannot be read."""
    try:
        return _record(_row(line, _parser()))
    except _WRONG:
        return None


def _record(row: Row) -> Record:
    (epoch, step, batch, samples, tokens), when, values = row
    return Record(Counters(epoch=epoch, step=step, batch=batch, samples=samples, tokens=tokens), when, values)


def _decision(content: Any) -> Decision:
    facts = _object(content)
    what, who, why = (str(facts.pop(name)) for name in ("what", "who", "why"))
    data = facts.pop("data", {})
    if not isinstance(data, dict):
        raise TypeError("data is no object")
    return Decision(what, who, why, Counters(**{name: count_in(value) for name, value in facts.items()}), data)


def _row(line: bytes | str, parse: Parse) -> Row:
    """Return the counters, the time and the values in a line. Raises one of `_WRONG` if it is no record."""
    try:
        values = _object(parse(line))
    except ValueError:
        values = _object(json.loads(line))  # which also reads NaN, and numbers of any size
    take = values.pop
    epoch, step, batch, samples, when = take("epoch"), take("step"), take("batch"), take("samples"), take("time")
    tokens = take("tokens", 0)  # written if they are counted
    if not (type(epoch) is type(step) is type(batch) is type(samples) is type(tokens) is int):
        epoch, step, batch, samples, tokens = map(count_in, (epoch, step, batch, samples, tokens))
    elif min(epoch, step, batch, samples, tokens) < 0 or max(epoch, step, batch, samples, tokens) > _LARGEST:
        raise ValueError("a counter is negative, or does not fit into 64 bits")
    if type(when) is not float or not 0 <= when < _LATEST_S:
        when = time_in(when)
    for name, value in values.items():
        if type(value) is float:  # most are
            if -_EXACT < value < _EXACT or parse is json.loads:
                continue
            return _row(line, json.loads)  # orjson makes a float of a whole number that is larger
        if not isinstance(value, int | float | str):
            raise TypeError("a value is no number")
        number = float(value)  # a whole number may be too large for one
        values[name] = number if isinstance(value, str) else value
    return (epoch, step, batch, samples, tokens), when, values


def _parser() -> Parse:
    """Return orjson's function if the package is installed: it takes a fifth of the time. `_row` makes the results the same."""
    try:
        from orjson import loads
    except ImportError:
        return json.loads
    return loads


def _object(content: Any) -> dict[str, Any]:
    if type(content) is not dict:
        raise ValueError("no object")
    return content


def _parsed(lines: Iterable[tuple[int, bytes]], parse: Callable[[bytes], T], broken: list[int] | None) -> Iterator[T]:
    """Yield what `parse` returns for each line. The numbers of lines that cannot be read are appended to `broken`."""
    for number, line in lines:
        try:
            yield parse(line)
        except _WRONG:
            if broken is not None and (line.endswith(b"\n") or _is_object(line)):
                broken.append(number)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):  # also bytes that are not UTF-8
        return False


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


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; none if there is no file."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        yield from enumerate(file, 1)


def _lines_with(names: Collection[str], lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that may hold one of these names, and the last complete line."""
    keys = [json.dumps(name).encode() for name in names]
    skipped: tuple[int, bytes] | None = None
    for number, line in lines:
        if any(key in line for key in keys):
            skipped = None
            yield number, line
        elif line.endswith(b"\n"):
            skipped = number, line
    if skipped is not None:
        yield skipped
