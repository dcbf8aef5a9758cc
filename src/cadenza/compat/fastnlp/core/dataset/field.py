"""One column of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cadenza.compat.absent import advise

advise(__name__)


class FieldArray:
    """The values of one field, one per row, in the order of the data set."""

    def __init__(self, name: str, content: Sequence[Any]) -> None:
        if isinstance(content, str) or not isinstance(content, Sequence):
            content = list(content)
        self.name, self.content = name, list(content)

    def append(self, value: Any) -> None:
        """Add the value of one more row."""
        self.content.append(value)

    def get(self, indices: int | slice | Sequence[int]) -> Any:
        """Return the value of a row, or a list of the values of several rows."""
        if isinstance(indices, int | slice):
            return self.content[indices]
        return [self.content[index] for index in indices]

    def __getitem__(self, indices: int | slice | Sequence[int]) -> Any:
        return self.get(indices)

    def __setitem__(self, index: int, value: Any) -> None:
        self.content[index] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def __repr__(self) -> str:
        return f"FieldArray {self.name}: {self.content!r}"
