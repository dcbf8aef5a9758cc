"""Collate samples: numbers become tensors, and shorter samples are padded."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from cadenza.compat.fastnlp.core.collators.padding import BACKENDS, padded
from cadenza.compat.fastnlp.core.log.logger import logger

Path = tuple[Hashable, ...]
"""The path of names to a field; () is the sample itself."""


class Batch(dict[str, Any]):
    """A batch by field, with the indices of its samples, which it keeps across worker processes."""

    indices: list[int] | None = None
    """The indices of the samples in the data set."""


class _Setting(NamedTuple):
    """The padding of a field."""

    pad_val: float | None
    dtype: Any
    backend: str | None
    pad_fn: Callable[[list[Any]], Any] | None


class Collator:
    """Pad the fields of samples to the longest, with 0.

    Nested lists of integers become int64, of floats float32, of booleans bool. A field with other types, with mixed types, or
    with lists of different depth stays a list. A field that is a dictionary becomes a dictionary of fields.

    Fields are given by name; a field of an inner dictionary by a tuple of names; an element of a sample that is a sequence as
    ``"_0"``, ``"_1"`` and so on; and a sample that is one field as ``"_single"``.

    Args:
        backend: ``"torch"`` or ``"auto"``; ``"numpy"`` for arrays; ``"raw"`` for lists; None: do not pad.

    >>> Collator()([{"words": [3, 4], "raw": "a b"}, {"words": [5], "raw": "c"}])
    {'words': tensor([[3, 4],
            [5, 0]]), 'raw': ['a b', 'c']}
    """

    def __init__(self, backend: str | None = "auto") -> None:
        self.input_fields: dict[Path, _Setting] = {}
        self.ignore_fields: set[Path] = set()
        self.set_backend(backend)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a dictionary for mappings, a list of fields for sequences, otherwise one field.

        Raises:
            ValueError: A field cannot be padded, but `set_pad` gave it a value other than 0 or a type.
        """
        first = samples[0]
        if () not in self.input_fields and isinstance(first, list | tuple):
            fields = enumerate(zip(*samples, strict=True))
            named = [((f"_{number}",), list(values)) for number, values in fields]
            return [self._padded(path, values) for path, values in named if path not in self.ignore_fields]
        return self._field((), list(samples))

    def set_pad(
        self,
        field_name: Hashable,
        pad_val: float | None = 0,
        dtype: Any = None,
        backend: str | None = "auto",
        pad_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Collator:
        """Choose how a field is padded. Return self.

        Args:
            field_name: The field.
            pad_val: The value of the padding; None: keep a list.
            dtype: The type of the result; None: that of the values.
            backend: As in the constructor; None: that of the collator.
            pad_fn: Returns the field of a batch from the list of the values, instead of the other arguments.

        Raises:
            KeyError: A field inside of it, or the one that contains it, has a setting already.
            AssertionError: Samples cannot have both this field and one with a setting.
        """
        path = _path(field_name)
        self._check_kind(path)
        for ignored in list(self.ignore_fields):
            self._check_apart(path, ignored, "ignored")
            if ignored == path:
                logger.rank_zero_warning(f"the field {field_name!r} was ignored; now it is padded")
                self.ignore_fields.remove(ignored)
        for other in self.input_fields:
            self._check_apart(path, other, "padded")
        chosen = self.backend if backend is None else _checked(backend)
        self.input_fields[path] = _Setting(pad_val, dtype, chosen, pad_fn)
        return self

    def set_ignore(self, *field_names: Hashable) -> Collator:
        """Omit fields from the batches. Return self.

        Raises:
            KeyError: The field is inside of one with a setting of `set_pad`.
        """
        for path in map(_path, field_names):
            for other in list(self.input_fields):
                if path[: len(other)] == other and path != other:
                    raise KeyError(f"the field {path} cannot be ignored, because {other}, which contains it, is padded")
                if other[: len(path)] == path:
                    name = other[0] if len(other) == 1 else other
                    logger.rank_zero_warning(f"the field {name!r} was padded; now it is ignored")
                    del self.input_fields[other]
            self.ignore_fields.add(path)
        return self

    def set_backend(self, backend: str | None) -> None:
        """Choose the type of padded fields, as in the constructor."""
        self.backend: str | None = _checked(backend)

    def _field(self, path: Path, values: list[Any]) -> Any:
        if path in self.input_fields or not isinstance(values[0], Mapping):
            return self._padded(path, values)
        return {
            name: self._field(inner, [value[name] for value in values])
            for name in values[0]
            if (inner := (*path, name)) not in self.ignore_fields
        }

    def _padded(self, path: Path, values: list[Any]) -> Any:
        setting = self.input_fields.get(path)
        if setting is not None and setting.pad_fn is not None:
            return setting.pad_fn(values)
        pad_val, dtype, backend, _ = setting or _Setting(0, None, self.backend, None)
        backend = self.backend if backend == "auto" else backend
        if pad_val is None or backend is None:
            return values
        try:
            return padded(values, pad_val, dtype, "torch" if backend == "auto" else backend)  # type: ignore[arg-type]  # checked
        except ValueError as error:
            if pad_val == 0 and dtype is None:
                return values
            error.add_note(f"in the field {path}, which has a setting of set_pad. Pass pad_val=None to keep a list.")
            raise

    def _check_kind(self, path: Path) -> None:
        """Samples are mappings, sequences or single fields, so settings are of one kind."""
        for other in self.input_fields:
            if _kind(other) != _kind(path):
                raise AssertionError(f"samples cannot have both the fields {other} and {path}")

    @staticmethod
    def _check_apart(path: Path, other: Path, what: str) -> None:
        short = min(len(path), len(other))
        if path != other and path[:short] == other[:short]:
            raise KeyError(f"the field {path} cannot be padded, because {other} is {what}, and one contains the other")


def _path(field: Hashable) -> Path:
    return () if field == "_single" else field if isinstance(field, tuple) else (field,)


def _kind(path: Path) -> str:
    if not path:
        return "single"
    return "sequence" if isinstance(path[0], str) and re.fullmatch(r"_\d+", path[0]) else "mapping"


def _checked(backend: str | None) -> str | None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, because Cadenza trains with torch; got {backend!r}")
    return backend
