"""One row of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Instance(Mapping[str, Any]):
    """The fields of one sample, by name.

    >>> row = Instance(words=["a", "b"], target=1)
    >>> row["target"], list(row)
    (1, ['words', 'target'])
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def add_field(self, field_name: str, field: Any) -> None:
        """Add a field or replace its value."""
        self.fields[field_name] = field

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise KeyError(f"there is no field {name!r}; there are {list(self.fields)}")
        return self.fields[name]

    def __setitem__(self, name: str, field: Any) -> None:
        self.add_field(name, field)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a new dictionary."""
        return dict(self.fields)

    def __repr__(self) -> str:
        from cadenza.compat.fastnlp.core.dataset.table import table_of  # imported here: rows are rarely shown

        return table_of(list(self), [self], rows_shown=1)
