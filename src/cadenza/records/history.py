"""The numbers of all records of a run, in memory: all of a short run, a thinned view of a very long one."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cadenza.errors import MissingExtraError, nearest
from cadenza.files.disk import open_regular, replacing
from cadenza.records.reading import read_records
from cadenza.records.record import Record
from cadenza.status.formats import counted, few, precise
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    import pandas

LIMIT = 50_000
_SHOWN, _MOST_ROWS = 4, 50  # names in the line of a history, and in its table
_COUNTS = attrgetter(*(field.name for field in fields(Counters)))  # astuple takes 30 times as long
_TAIL = 1 << 20  # bytes at the end of a file, among which its last line is sought
_Row = tuple[Counters, float, int]


def _unknown(name: object, known: Sequence[str]) -> KeyError:
    return KeyError(f"nothing was logged as {name!r}.{nearest(str(name), known)} There is: {[*known]}")


class _Latest(dict[str, float]):
    def __missing__(self, name: str) -> float:
        raise _unknown(name, [*self])


class History:
    """Every record's numbers, in memory; of a name with very many, one in so many.

    A name keeps at most `limit` values. When that is reached, every second one is dropped, and from then on every second
    one is kept; later every fourth, and so on. The first and the newest are always there. ``metrics.jsonl`` has them all.

    Args:
        limit: How many values of a name are kept, at least 4: about 130 bytes each in memory, and 16 in a checkpoint. It may
            be set later, in ``on_setup`` for example: ``run.history.limit = 200_000``.

    >>> from cadenza import Counters, Record
    >>> history = History()
    >>> history.add(Record(Counters(step=5), 0.0, {"train/loss": 0.5}))
    >>> history["train/loss"], history.latest, history.names
    ([(5, 0.5)], {'train/loss': 0.5}, ['train/loss'])
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 4:
            raise ValueError(f"limit must be at least 4 values of a name; got {limit!r}")
        self.limit = limit
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._given: dict[str, int] = {}  # how many values came of a name, where not all are kept
        self._every: dict[str, int] = {}
        self._rows: list[_Row] = []  # of each record, when it was and the index of its names
        self._names: dict[tuple[str, ...], int] = {}

    def add(self, record: Record) -> str | None:
        """Keep the numbers of a record. When thinning begins, return a sentence that says so, once."""
        notice = None
        index = self._names.setdefault(tuple(record.values), len(self._names))
        self._rows.append((record.at, record.time, index))
        for name, value in record.values.items():
            series = self._series.setdefault(name, [])
            if name in self._given:
                self._drop_newest(name)
            series.append((record.at.step, value))
            if len(series) >= self.limit:
                notice = self._thin(name) or notice
        return notice

    def _drop_newest(self, name: str) -> None:
        """Drop the newest value of a thinned name before another one comes, if it was kept only as the newest."""
        if (self._given[name] - 1) % self._every[name]:
            self._series[name].pop()
        self._given[name] += 1

    def _thin(self, name: str) -> str | None:
        """Drop every second value of a name. Return the notice at the first name."""
        first = not self._every
        if len(self._rows) >= self.limit:
            self._rows = [*self._rows[::2], self._rows[-1]]
        series = self._series[name]
        self._given.setdefault(name, len(series))
        self._every[name] = self._every.get(name, 1) * 2
        # The newest stays: if it is not in line with the others, only until the next one comes.
        series[:] = series[::2] if len(series) % 2 else [*series[::2], series[-1]]
        if not first:
            return None
        return (
            f"{name!r} has {counted(self._given[name], 'value')}: run.history keeps one in {self._every[name]} of them "
            "from here on, and likewise of other names when they have as many; metrics.jsonl has all"
        )

    @property
    def thinned(self) -> dict[str, int]:
        """By name, of how many values one is kept, where not all are."""
        return dict(self._every)

    def __getitem__(self, name: str) -> list[tuple[int, float]]:
        """Return all (step, value) of a name that are kept.

        Raises:
            KeyError: Nothing was logged under this name; the nearest one is shown.
        """
        if name not in self._series:
            raise _unknown(name, self.names)
        return self._series[name]

    def __contains__(self, name: object) -> bool:
        return name in self._series

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __repr__(self) -> str:
        if not self._series:
            return "<History: empty>"
        return f"<History: {self._length()}: {few(self.names, _SHOWN)}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: of each name the last, the lowest and the highest value."""
        from cadenza.status.markup import notebook_table  # imported here: few runs are in a notebook

        rows = [_figures(name, series) for name, series in list(self._series.items())[:_MOST_ROWS]]
        more = f"; the first {len(rows)} are" if len(rows) < len(self._series) else ""
        title = f"{counted(len(self._series), 'name')}, {self._length()}{more}" if rows else "no values yet"
        return notebook_table(title, ("", "last", "min", "max", "values") if rows else (), rows)

    def _length(self) -> str:
        ends = [(series[0][0], series[-1][0]) for series in self._series.values()]
        first, last = min(end for end, _ in ends), max(end for _, end in ends)
        return f"step {last}" if first == last else f"steps {first} to {last}"

    @property
    def names(self) -> list[str]:
        """Every name that was logged, in the order of first appearance."""
        return list(self._series)

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each name."""
        return _Latest({name: series[-1][1] for name, series in self._series.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return for each name steps (N,) int64, values (N,) float64, how many came, and one in how many is kept."""
        return {
            name: (
                torch.tensor([step for step, _ in series]),
                torch.tensor([value for _, value in series], dtype=torch.float64),
                self._given.get(name, len(series)),
                self._every.get(name, 1),
            )
            for name, series in self._series.items()
        }

    def rows_state(self) -> dict[str, Any]:
        """Return of the records that are kept counters (N, 6) int64, times (N,) float64, and which set of names each has."""
        return {
            "counters": torch.tensor([_COUNTS(at) for at, _, _ in self._rows], dtype=torch.int64).reshape(-1, 6),
            "times": torch.tensor([when for _, when, _ in self._rows], dtype=torch.float64),
            "names": torch.tensor([index for _, _, index in self._rows], dtype=torch.int64),
            "sets": [list(names) for names in self._names],
        }

    @property
    def newest(self) -> Record | None:
        """The counters and the time of the newest record, without its numbers; None if there is none."""
        return Record(*self._rows[-1][:2], {}) if self._rows else None

    def records(self) -> Iterator[Record]:
        """Yield the records as far as they are kept."""
        left = {name: deque(series) for name, series in self._series.items()}
        sets = list(self._names)
        for at, when, index in self._rows:
            values = {}
            for name in sets[index]:
                series = left[name]
                while series and series[0][0] < at.step:
                    series.popleft()  # its record is not kept
                if series and series[0][0] == at.step:
                    values[name] = series.popleft()[1]
            yield Record(at, when, values)

    @staticmethod
    def from_state(state: Mapping[str, Any], limit: int = LIMIT, rows: Mapping[str, Any] | None = None) -> History:
        """Return the history that `state_dict` and `rows_state` were made of."""
        history = History(limit)
        if rows is not None:
            sets = [history._names.setdefault(tuple(names), len(history._names)) for names in rows["sets"]]
            columns = (rows[name].tolist() for name in ("counters", "times", "names"))
            history._rows = [(Counters(*at), when, sets[index]) for at, when, index in zip(*columns, strict=True)]
        for name, (steps, values, given, every) in state.items():
            history._series[name] = list(zip(steps.tolist(), values.tolist(), strict=True))
            if every > 1:
                history._given[name], history._every[name] = given, every
        return history

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame: a row for each step in which something was logged, a column for each name."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", needed_by="History.to_frame()", extra="data") from None
        columns = {name: pandas.Series(dict(series)) for name, series in self._series.items()}
        return pandas.DataFrame(columns).rename_axis("step").sort_index()


def _figures(name: str, series: list[tuple[int, float]]) -> list[str]:
    """Return the row of a name in the table of a notebook."""
    finite = [value for _, value in series if math.isfinite(value)]
    values = (series[-1][1], min(finite, default=math.nan), max(finite, default=math.nan))
    return [name, *map(precise, values), f"{len(series):,}"]


def write_again(path: Path, history: History) -> int:
    """Write the records that a history has and the file lacks, and return their number. Other rows do not change.

    The file is read only if its last line differs from the newest record. Whole numbers come back as floats.

    Args:
        path: The ``metrics.jsonl`` of the run, cut to its length at the time of the checkpoint.
        history: The history in the checkpoint. Records that a thinned history does not keep are lost.
    """
    newest = history.newest
    return 0 if newest is None or _last_key(path) == _key(newest) else _write_missing(path, history, newest)


def _write_missing(path: Path, history: History, newest: Record) -> int:
    expected = list(history.records())
    last = _key(newest)[2]  # batches
    there = [record for record in read_records(path) if record.at.batch <= last]
    known = Counter(map(_key, there))
    missing = []
    for record in expected:
        if known[_key(record)]:
            known[_key(record)] -= 1
        else:
            missing.append(record)
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(f"{record.to_json()}\n" for record in sorted([*there, *missing], key=lambda item: item.at.batch))
    return len(missing)


def _key(record: Record) -> tuple[int, int, int, int]:
    return record.at.epoch, record.at.step, record.at.batch, record.at.samples


def _last_key(path: Path) -> tuple[int, int, int, int] | None:
    """Return the key of the last line; None if there is no line, or it is cut."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines(keepends=True)
        line = json.loads(lines[-1]) if lines and lines[-1].endswith(b"\n") else {}
        return line["epoch"], line["step"], line["batch"], line["samples"]
    except (FileNotFoundError, LookupError, TypeError, ValueError, RecursionError):
        return None
