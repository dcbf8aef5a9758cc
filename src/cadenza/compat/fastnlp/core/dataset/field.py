"""One column of a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Flag = bool
Index = int
Indices = int | slice | Sequence[int]  # the class has methods with the names of these types


class FieldArray:
    """The values of one field, one per row, in the order of the data set."""

    def __init__(self, name: str, content: Sequence[Any]) -> None:
        if isinstance(content, str) or not isinstance(content, Sequence):
            content = list(content)
        self.name: str = name
        self.content: list[Any] = list(content)

    def append(self, value: Any) -> None:
        """Append the value of a row."""
        self.content.append(value)

    def pop(self, index: Index) -> None:
        """Remove the value of a row."""
        self.content.pop(index)

    def get(self, indices: Indices) -> Any:
        """Return the value of a row, a list for a slice, or an array of the values of several rows.

        The array has type object if the values are lists of different length.
        """
        if isinstance(indices, int | slice):
            return self.content[indices]
        values = [self.content[index] for index in indices]
        try:
            return np.array(values)
        except ValueError:
            whole = np.empty(len(values), dtype=object)
            whole[:] = values
            return whole

    def split(self, sep: str | None = None, inplace: Flag = True) -> Any:
        """Split each text. Return self, or the new values with `inplace` False."""
        return self._after([text.split(sep) for text in self.content], inplace)

    def int(self, inplace: Flag = True) -> Any:
        """Convert each value, or each value in its list, to an integer; see `split`."""
        return self._after(_each(int, self.content), inplace)

    def float(self, inplace: Flag = True) -> Any:
        """Convert each value, or each value in its list, to a float; see `split`."""
        return self._after(_each(float, self.content), inplace)

    def bool(self, inplace: Flag = True) -> Any:
        """Convert each value, or each value in its list, to a boolean; see `split`."""
        return self._after(_each(bool, self.content), inplace)

    def lower(self, inplace: Flag = True) -> Any:
        """Convert each text, or each text in its list, to lower case; see `split`."""
        return self._after(_each(str.lower, self.content), inplace)

    def upper(self, inplace: Flag = True) -> Any:
        """Convert each text, or each text in its list, to upper case; see `split`."""
        return self._after(_each(str.upper, self.content), inplace)

    def value_count(self) -> Counter[Any]:
        """Return how often each value occurs."""
        return Counter(self.content)

    def _after(self, values: list[Any], inplace: Flag) -> Any:
        if inplace:
            self.content = values
        return self if inplace else values

    def __getitem__(self, indices: Indices) -> Any:
        return self.get(indices)

    def __setitem__(self, index: Index, value: Any) -> None:
        self.content[index] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.content)

    def __len__(self) -> Index:
        return len(self.content)

    def __repr__(self) -> str:
        return f"FieldArray {self.name}: {self.content!r}"


def _each(change: Callable[[Any], Any], content: list[Any]) -> list[Any]:
    return [[change(part) for part in value] if isinstance(value, list) else change(value) for value in content]
