"""Write records as lines of JSON."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cadenza.errors import DirectoryError
from cadenza.files.paths import local_path
from cadenza.hooks.moments import Callback
from cadenza.sinks.own_file import earlier_records, own_path

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run


class JsonLines(Callback):
    """Append each record as a line of JSON: counters, time, numbers. Each line is flushed, so that it can be read at once.

    A run with a directory writes such a file, ``metrics.jsonl``, many lines at once: each within a second. This sink
    writes another one, at a path of your choice, each line before the next step. A run that continues removes the lines after
    its checkpoint.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        path: The path of the file. A relative path starts at the directory of the run, if it has one. None writes no other
            file; the run writes each line of its own ``metrics.jsonl`` before the next step, so that a kill loses none.

    Raises:
        DirectoryError: At the start of a run: the file exists and is not of this run, is ``metrics.jsonl``, or cannot be
            written; or `path` is None and the run has no directory.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = LogTraining(every="2 steps", throughput=False)
    ...     run = tiny_run(callbacks=[log, JsonLines("train.jsonl")], steps=4, directory=folder)
    ...     print((run.info.directory / "train.jsonl").read_text())  # doctest: +ELLIPSIS
    {"epoch": 0, "step": 2, "batch": 2, "samples": 4, "time": ..., "train/loss": ..., "train/lr": 0.1}
    {"epoch": 0, "step": 4, "batch": 4, "samples": 8, "time": ..., "train/loss": ..., "train/lr": 0.1}
    <BLANKLINE>
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self.path: Path | None = None if path is None else local_path(path)
        self._file: TextIO | None = None

    def on_fit_start(self, run: Run) -> None:
        self._file = None
        if self.path is None:
            self._write_own_at_once(run)
        elif run.is_main:
            path = own_path(self.path, run.info, sink="JsonLines", begins='{"epoch": ')
            beside = path.with_name(f"{path.name}.new")
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(record.to_json() + "\n" for record in earlier_records(run.info))
            beside.replace(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
            run.at_end(self._file.close)

    def on_log(self, run: Run, record: Record) -> None:
        if self._file is not None:  # None: it failed to start, and the run is ending with that error
            self._file.write(record.to_json() + "\n")

    def _write_own_at_once(self, run: Run) -> None:
        if run.info.directory is None:
            raise DirectoryError(
                "JsonLines() without a path writes the metrics.jsonl of the run at once, but the run has no directory. Give "
                "Trainer(directory=...), or JsonLines a path."
            )
        if (files := run._session.files) is not None:
            files.write_records_at_once()
