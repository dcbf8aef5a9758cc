"""Write records as a table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cadenza.files.paths import local_path
from cadenza.sinks.own_file import earlier_records, own_path
from cadenza.sinks.sink import Sink
from cadenza.status.formats import no_formula

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_COUNTERS = ["epoch", "step", "batch", "samples", "time"]


class Csv(Sink):
    """Write each record as a row of one table: counters, time, and a column for each name. A cell without a value is empty.

    The file can be read during the run. If the process is killed, at most the last row is lost. A new name adds a column: the
    table is written to a second file, which then replaces the first. A run that continues removes the rows after its
    checkpoint.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        path: The path of the file. A relative path starts at the directory of the run, if it has one.

    Raises:
        DirectoryError: At the start of a run: the file exists and is not of this run, or cannot be written.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = LogTraining(every="2 steps", throughput=False)
    ...     run = tiny_run(callbacks=[log, Csv()], steps=4, directory=folder)
    ...     print((run.info.directory / "metrics.csv").read_text())  # doctest: +ELLIPSIS
    epoch,step,batch,samples,time,train/loss,train/lr
    0,2,2,4,...,0.1
    0,4,4,8,...,0.1
    <BLANKLINE>
    """

    _writes_now = True  # a kill would lose waiting rows

    def __init__(self, path: str | PathLike[str] = "metrics.csv") -> None:
        super().__init__()
        self.path: Path = local_path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def open(self, info: RunInfo) -> None:
        self._file_path = own_path(self.path, info, sink="Csv", begins=",".join(_COUNTERS))
        self._columns = [*_COUNTERS]
        rows = self._own_rows(info.step)
        if info.directory is not None or not info.continued:
            rows = (_row(record) for record in earlier_records(info) if record.values)
        earlier = [*rows]
        self._columns = [*dict.fromkeys(chain(_COUNTERS, chain.from_iterable(earlier)))]
        self._write_anew(earlier)

    def write(self, records: Sequence[Record]) -> None:
        assert self._file is not None, "open comes first"
        rows = [_row(record) for record in records if record.values]
        new = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in self._columns]
        if new:
            earlier = [*self._columns]
            self._columns += new
            with self._file_path.open(encoding="utf-8", newline="") as file:
                self._write_anew(islice(csv.DictReader(file, earlier), 1, None))
        csv.DictWriter(self._file, self._columns, lineterminator="\n").writerows(rows)

    def close(self, outcome: Outcome | None) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _own_rows(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of the file up to a step. A full disk may have cut the last one."""
        with self._file_path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("step", "").isdigit() and int(row["step"]) <= step:
                    yield row

    def _write_anew(self, rows: Iterable[dict[str, Any]]) -> None:
        self.close(None)
        beside = self._file_path.with_name(f"{self._file_path.name}.new")
        with beside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(map(no_formula, self._columns))
            csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)
        beside.replace(self._file_path)
        self._file = self._file_path.open("a", encoding="utf-8", newline="", buffering=1)


def _row(record: Record) -> dict[str, Any]:
    at = record.at
    counters = (at.epoch, at.step, at.batch, at.samples, round(record.time, 3))
    tokens = {"tokens": at.tokens} if at.tokens else {}  # a column if they are counted
    return {**dict(zip(_COUNTERS, counters, strict=True)), **tokens, **record.values}
