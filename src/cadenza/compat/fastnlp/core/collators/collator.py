"""Collate samples: numbers become tensors, and shorter samples are padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from cadenza.compat.absent import advise

advise(__name__)

_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}


class Batch(dict[str, Any]):
    """A batch by field, with the indices of its samples, also from a worker process."""

    indices: list[int] | None = None
    """The indices of the samples in the data set."""


class Collator:
    """Pad the fields of samples to the longest, with 0.

    Nested lists of integers become int64, of floats float32, of booleans bool. A field with other types, with mixed types, or
    with lists of different depth stays a list.

    >>> Collator()([{"words": [3, 4], "raw": "a b"}, {"words": [5], "raw": "c"}])
    {'words': tensor([[3, 4],
            [5, 0]]), 'raw': ['a b', 'c']}
    """

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a dictionary for mappings, a list of fields for sequences, otherwise one field."""
        first = samples[0]
        if isinstance(first, Mapping):
            return {name: padded([sample[name] for sample in samples]) for name in first}
        if isinstance(first, list | tuple):
            return [padded(list(values)) for values in zip(*samples, strict=True)]
        return padded(list(samples))


def padded(values: list[Any]) -> Any:
    """Return the values as one tensor, padded with 0; the list itself if that is not possible.

    >>> padded([[[1], [2, 3]], [[4]]]).tolist()
    [[[1, 0], [2, 3]], [[4, 0], [0, 0]]]
    >>> padded([1, 2.5]), padded([[1], None])
    ([1, 2.5], [[1], None])
    """
    if values and all(isinstance(value, Tensor) for value in values):
        return _of_tensors(values)
    plain = [_plain(value) for value in values]
    sizes: list[int] = []
    kinds: set[type] = set()
    depths: set[int] = set()
    _survey(plain, 0, sizes, kinds, depths)
    if len(kinds) != 1 or depths != {len(sizes)} or not kinds <= _DTYPES.keys():
        return values
    whole = torch.zeros(sizes, dtype=_DTYPES[kinds.pop()])
    _fill(whole, plain)
    return whole


def _of_tensors(values: list[Tensor]) -> Any:
    if len({(value.ndim, value.dtype) for value in values}) > 1:
        return values
    sizes = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    whole = values[0].new_zeros([len(values), *sizes])
    for number, value in enumerate(values):
        index: list[int | slice] = [number, *(slice(length) for length in value.shape)]
        whole[tuple(index)] = value
    return whole


def _plain(value: Any) -> Any:
    """Return arrays and tensors in a field as lists and numbers."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _survey(value: Any, depth: int, sizes: list[int], kinds: set[type], depths: set[int]) -> None:
    """Collect the length of the longest list of each depth, the types of the numbers, and their depths."""
    if isinstance(value, list):
        if len(sizes) == depth:
            sizes.append(0)
        sizes[depth] = max(sizes[depth], len(value))
        for part in value:
            _survey(part, depth + 1, sizes, kinds, depths)
    else:
        depths.add(depth)
        kind = bool if isinstance(value, bool) else int if isinstance(value, Integral) else type(value)
        kinds.add(float if kind is not int and kind is not bool and isinstance(value, Real) else kind)


def _fill(whole: Tensor, values: list[Any]) -> None:
    if whole.ndim == 1:
        whole[: len(values)] = torch.tensor(values, dtype=whole.dtype)
        return
    for part, inner in zip(whole, values, strict=False):
        _fill(part, inner)
