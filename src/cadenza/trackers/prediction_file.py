"""The file of ``predict(to=...)``: each batch is written when it is computed, on multiple ranks at the end."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from cadenza.drivers import Driver
from cadenza.drivers.consensus import by_main_from_all
from cadenza.engine.session import Session
from cadenza.engine.start_checks import main_only
from cadenza.errors import DataError, DirectoryError, DistributedError
from cadenza.files.paths import local_path
from cadenza.sinks.own_file import own_folder
from cadenza.status.encoding import is_array
from cadenza.status.outputs import Outputs, parts_of
from cadenza.trackers.tables import Format, Table, column_of, format_of, plain_value, writing

_OWNER = "predict(to=...)"
_COUNTER = "index"


class PredictionFile:
    """The file to write.

    Args:
        to: Its path.

    Raises:
        TypeError: `to` is no path.
        ValueError: `to` has an unknown suffix, or is a URL.
        MissingExtraError: It is a Parquet file, and pyarrow is not installed.
    """

    def __init__(self, to: object) -> None:
        if not isinstance(to, str | os.PathLike):
            raise TypeError(f"to must be the path of a file, such as 'predictions.parquet'; got {to!r}")
        if "://" in os.fspath(to):
            raise ValueError(f"to must be a local file; got the URL {os.fspath(to)!r}. Write a local file, and copy it.")
        self._to, self._format = local_path(to), format_of(local_path(to), needed_by=_OWNER)

    def opened(self, session: Session, files: ExitStack) -> _InFile | _Spooled:
        """Return what takes the predictions for a batch, and returns the path. Every rank must call this."""
        path = session.run.info.base / self._to
        main_only(session.driver, lambda: _check_can_write(path))  # before the first batch
        if session.driver.world_size == 1:
            return _InFile(path, files.enter_context(writing(path, self._format, counter=_COUNTER)))
        folder = path.parent if path.parent.is_dir() else None  # another machine may not have it
        return _Spooled(session.driver, path, self._format, files.enter_context(tempfile.TemporaryFile(dir=folder)))


def _check_can_write(path: Path) -> None:
    own_folder(path.parent, sink=_OWNER)
    if path.is_dir():
        raise DirectoryError(f"{_OWNER} cannot write {str(path)!r}: it is a folder. Give the path of a file.")


class _InFile:
    """Writes each batch."""

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table

    def add(self, batch: Any, outputs: Outputs) -> None:
        self._table.add(columns_of(outputs["predictions"]))

    def result(self) -> Path:
        return self._path


class _Spooled:
    """Keeps the batches of this rank in a temporary file. At the end the main process writes those of all ranks, in rounds.

    So ranks do not wait for each other at each batch, and none needs more memory than for a batch; the main process needs that
    for a batch of each rank.
    """

    def __init__(self, driver: Driver, path: Path, format_: Format, spool: BinaryIO) -> None:
        self._driver, self._path, self._format, self._spool = driver, path, format_, spool
        self._batches = 0

    def add(self, batch: Any, outputs: Outputs) -> None:
        columns = columns_of(outputs["predictions"])
        if self._driver.counts:
            pickle.dump(columns, self._spool, protocol=pickle.HIGHEST_PROTOCOL)
            self._batches += 1

    def result(self) -> Path:
        def write(arriving: Iterator[dict[str, Any]]) -> None:
            with writing(self._path, self._format, counter=_COUNTER) as table:
                for rows in arriving:
                    table.add(rows)

        self._spool.seek(0)
        own = (pickle.load(self._spool) for _ in range(self._batches))
        arriving = self._driver.in_turns(own, self._batches)
        by_main_from_all(
            self._driver.meeting,
            arriving,
            write,
            lambda rank, problem: DistributedError(f"the main process could not write {str(self._path)!r}: {problem}"),
        )
        return self._path


def columns_of(predictions: Any) -> dict[str, Any]:
    """Return the predictions for a batch of N samples as columns by name, on the host.

    Raises:
        DataError: They are no columns, or have different lengths.
    """
    columns = dict(_columns("", predictions))
    lengths = {name: len(column) for name, column in columns.items()}
    if not columns or len(set(lengths.values())) > 1:
        raise DataError(
            f"{_OWNER} needs a prediction for each sample of the batch in all columns; got "
            f"{lengths or 'no columns'}. Return tensors of shape (N, ...), lists of N values, or a mapping of these."
        )
    return columns


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and columns of a value; `name` is empty for the whole prediction."""
    if named := _named_parts(value):
        for key, part in named.items():
            is_loss = not name and key == "loss" and getattr(part, "ndim", None) == 0  # of a model that returns its own
            if part is not None and not is_loss:
                yield from _columns(f"{name}/{key}" if name else str(key), part)
    elif is_array(value) and value.ndim:
        yield name or "prediction", column_of(value)
    elif isinstance(value, list | tuple):
        yield name or "prediction", [plain_value(part) for part in value]
    else:
        came = f"shape {tuple(value.shape)}" if is_array(value) else type(value).__name__
        raise DataError(
            f"{_OWNER} cannot write {name or 'prediction'!r} as a column: expected a tensor of shape (N, ...), a list of N "
            f"values, or a mapping of these; got {came}. Return one of these from compute."
        )


def _named_parts(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a mapping, an object with fields, or a tuple of tensors; nothing for other values."""
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return cast("dict[str, Any]", value._asdict())
    if isinstance(value, tuple) and any(is_array(part) or isinstance(part, Mapping) for part in value):
        return {f"prediction/{number}": part for number, part in enumerate(value)}
    return parts_of(value) if is_dataclass(value) or hasattr(value, "loss") else {}
