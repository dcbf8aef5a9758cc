"""Tables that are written batch by batch, with bounded memory: Parquet, CSV and JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cadenza.errors import DataError, MissingExtraError
from cadenza.files.disk import replacing
from cadenza.status.encoding import is_array
from cadenza.status.formats import mapped, no_formula

Rows = Mapping[str, Any]
"""The columns of some samples by name: each an array of shape (N, ...), or a list of N values."""

_ROWS, _BYTES = 65_536, 4 * 2**20  # a row group of Parquet has at most so many rows, and not much more than so many bytes


class Table(Protocol):
    """A file that takes rows. Batches must have the same columns."""

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""

    def close(self) -> None:
        """Write the rest."""


Format = Callable[[Path, str], Table]
"""Opens a table at a path. The text is the name of the column that counts the rows from 0."""


def format_of(path: str | Path, *, needed_by: str) -> Format:
    """Return the format that the suffix of a path names.

    Raises:
        ValueError: No format has this suffix.
        MissingExtraError: pyarrow is needed and not installed.
    """
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(
            f"{needed_by} needs a path ending in .parquet, .csv or .jsonl; got {str(path)!r}, with the suffix {suffix!r}"
        )
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", needed_by=f"{needed_by} to a .parquet file", extra="parquet")
    return _FORMATS[suffix]


@contextmanager
def writing(path: Path, format_: Format, *, counter: str) -> Iterator[Table]:
    """Yield a table beside `path`, which replaces it as a whole at the end. After an error it is removed, and `path` unchanged.

    Args:
        path: The path of the file.
        format_: From `format_of`.
        counter: The name of the column that counts the rows from 0, unless the rows have a column of this name.
    """
    with replacing(path) as beside:
        table = format_(beside, counter)
        try:
            yield table
        except BaseException:
            with suppress(Exception):  # the first error is raised
                table.close()
            raise
        table.close()


def column_of(value: Any) -> Any:
    """Return a tensor as an array on the host that no later batch changes. Other values are returned unchanged.

    bfloat16 and other floats of less than 32 bits become float32, which is exact.
    """
    if not isinstance(value, Tensor):
        return value.copy() if is_array(value) else value
    narrow = value.is_floating_point() and value.dtype.itemsize < 4
    return value.detach().to("cpu", torch.float32 if narrow else value.dtype, copy=True).numpy()


def plain_value(value: Any) -> Any:
    """Return a value of a list with its tensors and arrays as numbers and lists."""
    if isinstance(value, Mapping):
        return {str(name): plain_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value.tolist() if is_array(value) else value


class _Counted:
    """Adds the column that counts the rows, and checks that all batches have the same columns."""

    def __init__(self, counter: str) -> None:
        self._counter, self._rows = counter, 0
        self._names: list[str] | None = None

    def numbered(self, rows: Rows) -> dict[str, Any]:
        names = [*rows]
        if self._names is None:
            self._names = names
        if names != self._names:
            raise DataError(f"every batch must have the same columns: the first has {self._names}, a later one {names}")
        length = len(next(iter(rows.values()), ()))
        first, self._rows = self._rows, self._rows + length
        counter = {} if self._counter in rows else {self._counter: torch.arange(first, first + length).numpy()}
        return {**counter, **rows}


class _Parquet(_Counted):
    """Row groups of several batches, so that small batches do not make a large file."""

    def __init__(self, path: Path, counter: str) -> None:
        super().__init__(counter)
        self._path = path
        self._writer: Any = None
        self._held: list[Any] = []
        self._held_rows = self._held_bytes = 0

    def add(self, rows: Rows) -> None:
        import pyarrow
        import pyarrow.parquet

        schema = None if self._writer is None else self._writer.schema
        arrays = {name: self._array(name, column, schema) for name, column in self.numbered(rows).items()}
        table = pyarrow.table(arrays)
        if self._writer is None:
            is_string, is_integer = pyarrow.types.is_string, pyarrow.types.is_integer
            repeated = [field.name for field in table.schema if is_string(field.type) or is_integer(field.type)]
            # A dictionary of scores saves no space, and takes most of the time.
            self._writer = pyarrow.parquet.ParquetWriter(self._path, table.schema, use_dictionary=repeated)
        self._held.append(table)
        self._held_rows, self._held_bytes = self._held_rows + table.num_rows, self._held_bytes + table.nbytes
        if self._held_rows >= _ROWS or self._held_bytes >= _BYTES:
            self._write()

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._write()
            finally:
                self._writer.close()

    def _array(self, name: str, column: Any, schema: Any) -> Any:
        import pyarrow

        kind = None if schema is None else schema.field(name).type
        try:
            array = _nested(column) if is_array(column) else pyarrow.array(plain_value(column), type=kind)
            return array if kind is None or array.type == kind else array.cast(kind)
        except (pyarrow.ArrowException, TypeError, OverflowError) as error:
            expected = "values of one kind" if kind is None else f"values of the kind of the first batch, {kind}"
            raise DataError(f"column {name!r} cannot be written as Parquet: expected {expected}; {error}") from error

    def _write(self) -> None:
        import pyarrow

        held, self._held, self._held_rows, self._held_bytes = self._held, [], 0, 0
        if held:
            self._writer.write_table(pyarrow.concat_tables(held), row_group_size=_ROWS)


class _Csv(_Counted):
    """A column for each number: an array of shape (N, K) makes K columns ``name/0`` to ``name/{K-1}``."""

    def __init__(self, path: Path, counter: str) -> None:
        super().__init__(counter)
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def add(self, rows: Rows) -> None:
        first = self._names is None
        columns = self.numbered({key: part for name, column in rows.items() for key, part in _split(name, column)})
        if first:
            self._writer.writerow(map(no_formula, columns))
        for row in zip(*map(_cells, columns.values()), strict=True):
            self._writer.writerow(map(no_formula, row))

    def close(self) -> None:
        self._file.close()


class _JsonLines(_Counted):
    """One JSON object per line. NaN and infinity, which JSON does not have, are null."""

    def __init__(self, path: Path, counter: str) -> None:
        super().__init__(counter)
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def add(self, rows: Rows) -> None:
        columns = self.numbered(rows)
        for row in zip(*map(_cells, columns.values()), strict=True):
            try:
                line = json.dumps(mapped(dict(zip(columns, row, strict=True)), _finite), ensure_ascii=False)
            except TypeError as error:
                raise DataError(
                    f"a row cannot be written as JSON: expected numbers, texts, lists and mappings; {error}"
                ) from None
            self._file.write(f"{line}\n")

    def close(self) -> None:
        self._file.close()


def _nested(values: Any) -> Any:
    """Return an array of shape (N, ...) as an array of N values, or of N lists."""
    import pyarrow

    array = pyarrow.array(values.reshape(-1))
    for depth in range(values.ndim - 1, 0, -1):
        lists, length = math.prod(values.shape[:depth]), values.shape[depth]
        offsets = pyarrow.array((torch.arange(lists + 1, dtype=torch.int32) * length).numpy())
        array = pyarrow.ListArray.from_arrays(offsets, array)
    return array


def _split(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns of CSV of one column."""
    dimensions = getattr(column, "ndim", 1)
    if dimensions == 2:
        yield from ((f"{name}/{index}", column[:, index]) for index in range(column.shape[1]))
    elif dimensions == 1 and not any(isinstance(plain_value(cell), list | Mapping) for cell in column):
        yield name, column
    else:
        shape = f"shape {tuple(column.shape)}" if dimensions != 1 else "a list in a row"
        raise DataError(
            f"column {name!r} cannot be written as CSV: expected shape (N,) or (N, K), or a list of N values; got {shape}. "
            "Write .parquet or .jsonl."
        )


def _cells(column: Any) -> list[Any]:
    return column.tolist() if is_array(column) else [plain_value(value) for value in column]


def _finite(value: Any) -> Any:
    """Return a value, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_FORMATS: dict[str, Format] = {".parquet": _Parquet, ".csv": _Csv, ".jsonl": _JsonLines}
