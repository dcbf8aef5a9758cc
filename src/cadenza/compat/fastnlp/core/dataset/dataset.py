"""fastNLP's table of samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, overload

from cadenza.compat.fastnlp.core.dataset.applying import ApplyResultException
from cadenza.compat.fastnlp.core.dataset.field import FieldArray
from cadenza.compat.fastnlp.core.dataset.instance import Instance
from cadenza.compat.fastnlp.core.dataset.operations import Operations, Row
from cadenza.compat.fastnlp.core.dataset.table import table_of
from cadenza.errors import MissingExtraError, nearest

if TYPE_CHECKING:
    import datasets


__all__ = ["ApplyResultException", "DataSet"]


class DataSet(Operations):
    """A table of samples in memory.

    Args:
        data: Lists of equal length by name; or a list of `Instance` or dictionaries with equal fields.

    Raises:
        AssertionError: The lists differ in length, or a row is neither.
        ValueError: The fields of the rows differ, or `data` is neither.

    >>> dataset = DataSet({"words": [["a"], ["b", "c"]], "target": [0, 1]})
    >>> dataset.add_seq_len("words")[1].to_dict()
    {'words': ['b', 'c'], 'target': 1, 'seq_len': 2}
    """

    def __init__(self, data: Mapping[str, Sequence[Any]] | Sequence[Row] | None = None) -> None:
        self.field_arrays: dict[str, FieldArray] = {}
        if data is None:
            return
        if isinstance(data, Mapping):
            if len(lengths := {name: len(content) for name, content in data.items()}) and len(set(lengths.values())) > 1:
                raise AssertionError(f"all fields must have the same length; got {lengths}")
            for name, content in data.items():
                self.add_field(name, content)
        elif isinstance(data, Sequence) and not isinstance(data, str):
            for row in data:
                if not isinstance(row, Mapping):
                    raise AssertionError(f"the rows must be of type Instance or dict; got a {type(row).__name__}")
                self.append(row)
        else:
            raise ValueError(f"a DataSet is made of a dict of lists, or a list of Instance; got {type(data).__name__}")

    @staticmethod
    def from_datasets(dataset: datasets.Dataset) -> DataSet:
        """Return a copy of a Hugging Face ``Dataset``, with all its columns.

        Raises:
            ValueError: `dataset` is not a ``Dataset``. Pass one part of a ``DatasetDict``, such as ``loaded["train"]``.
        """
        known = sys.modules.get("datasets")  # imported if `dataset` is one
        if known is None or not isinstance(dataset, known.Dataset):
            raise ValueError(
                f"from_datasets needs a datasets.Dataset; got {type(dataset).__name__}. Pass a part of a DatasetDict, such as "
                "loaded['train']."
            )
        return DataSet({name: list(dataset[name]) for name in dataset.column_names})

    # -- rows and fields ---------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> Instance: ...
    @overload
    def __getitem__(self, index: str) -> FieldArray: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> DataSet: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a row (number), a field (name), or the rows of a slice or a list of numbers as a new data set."""
        if isinstance(index, str):
            return self.get_field(index)
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there are {len(self)} rows; got the index {index}")
            return Instance(**{name: field[index] for name, field in self.field_arrays.items()})
        if isinstance(index, slice | Sequence):
            return self._rows(index)
        raise KeyError(f"expected a number, a slice, a list of numbers or the name of a field; got {index!r}")

    def _rows(self, index: slice | Sequence[int]) -> DataSet:
        numbers = range(len(self))[index] if isinstance(index, slice) else index
        if isinstance(index, slice) and index.start is not None and not -len(self) < index.start < len(self):
            raise RuntimeError(f"there are {len(self)} rows; got a slice from {index.start}")
        rows = DataSet()
        for name, field in self.field_arrays.items():
            rows.field_arrays[name] = FieldArray(name, [field.content[number] for number in numbers])
        rows._collator = deepcopy(self._collator)
        return rows

    def __setitem__(self, index: int, row: Row) -> None:
        """Replace a row by one with the same fields.

        Raises:
            KeyError: The fields differ.
        """
        if row.keys() != self.field_arrays.keys():
            raise KeyError(f"the row must have the fields {list(self.field_arrays)}; got {list(row)}")
        for name, field in self.field_arrays.items():
            field[index] = row[name]

    def __iter__(self) -> Iterator[Instance]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return next((len(field) for field in self.field_arrays.values()), 0)

    def __contains__(self, name: object) -> bool:
        return name in self.field_arrays

    def __str__(self) -> str:
        return table_of(list(self.field_arrays), self)

    __repr__ = __str__

    def append(self, instance: Row) -> DataSet:
        """Add a row with the same fields as the others. Return self."""
        if not self.field_arrays:
            self.field_arrays = {name: FieldArray(name, []) for name in instance}
        if instance.keys() != self.field_arrays.keys():
            raise ValueError(f"row {len(self)} must have the fields {list(self.field_arrays)}; got {list(instance)}")
        for name, value in instance.items():
            self.field_arrays[name].append(value)
        return self

    def add_field(self, field_name: str, fields: Sequence[Any]) -> DataSet:
        """Add or replace a field, with a value for each row. Return self.

        Raises:
            RuntimeError: There is not one value for each row.
        """
        field = FieldArray(field_name, fields)
        if not len(field) and not self.field_arrays:
            raise RuntimeError(f"the field {field_name!r} of a new DataSet must have at least one value; got none")
        if self.field_arrays.keys() - {field_name} and len(field) != len(self):
            raise RuntimeError(f"the field {field_name!r} must have {len(self)} values, as the others have; got {len(field)}")
        self.field_arrays[field_name] = field
        return self

    def delete_field(self, field_name: str) -> DataSet:
        """Remove a field. Return self.

        Raises:
            KeyError: There is no such field.
        """
        del self.field_arrays[self.get_field(field_name).name]
        return self

    def get_field(self, field_name: str) -> FieldArray:
        """Return a field.

        Raises:
            KeyError: There is no such field.
        """
        if field_name not in self.field_arrays:
            raise KeyError(
                f"there is no field {field_name!r}; there are {list(self.field_arrays)}."
                f"{nearest(field_name, self.field_arrays)}"
            )
        return self.field_arrays[field_name]

    def has_field(self, field_name: str) -> bool:
        """Return whether there is a field of this name."""
        return field_name in self.field_arrays

    def get_field_names(self) -> list[str]:
        """Return the names of the fields, in their order."""
        return list(self.field_arrays)

    # -- new fields ---------------------------------------------------------------------

    def add_seq_len(self, field_name: str, new_field_name: str = "seq_len") -> DataSet:
        """Add a field with the lengths of another field's values. Return self."""
        return self.add_field(new_field_name, [len(value) for value in self.get_field(field_name)])

    def split(self, ratio: float, shuffle: bool = True) -> tuple[DataSet, DataSet]:
        """Return two data sets: the first ``int(ratio * n)`` rows, and the rest.

        Args:
            ratio: Between 0 and 1, both excluded.
            shuffle: Shuffle the rows first, with numpy's global generator.
        """
        if not isinstance(ratio, float) or not 0 < ratio < 1:
            raise AssertionError(f"ratio must be a float between 0 and 1, both excluded; got {ratio!r}")
        indices = list(range(len(self)))
        if shuffle:
            _shuffle(indices)
        boundary = int(ratio * len(indices))
        return self[indices[:boundary]], self[indices[boundary:]]


def _shuffle(indices: list[int]) -> None:
    try:
        import numpy
    except ImportError:
        raise MissingExtraError("numpy", needed_by="DataSet.split(shuffle=True)", extra="data") from None
    numpy.random.shuffle(indices)
