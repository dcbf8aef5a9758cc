"""Pad lists of numbers, arrays and tensors."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Backend = Literal["torch", "numpy", "raw"]
BACKENDS = ("torch", "numpy", "raw", "auto", None)

_DTYPES: dict[Any, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}


def padded(values: list[Any], pad_val: float = 0, dtype: Any = None, backend: Backend = "torch") -> Any:
    """Return the values as one tensor, array or list, padded to the longest.

    Args:
        values: A value of each sample: numbers, lists inside of each other, arrays or tensors.
        pad_val: The value of the padding.
        dtype: The type of the result, of torch, numpy or Python. None: that of tensors; otherwise int64, bool or float
            (float32 in torch).
        backend: ``"torch"``, ``"numpy"``, or ``"raw"`` for lists.

    Raises:
        ValueError: The values have other types, different types, or lists of different depth.

    >>> padded([[[1], [2, 3]], [[4]]]).tolist()
    [[[1, 0], [2, 3]], [[4, 0], [0, 0]]]
    >>> padded([[1, 2], [3]], -1, float, "raw")
    [[1.0, 2.0], [3.0, -1.0]]
    """
    if all(isinstance(value, Tensor) for value in values):
        return _in(backend, _of_tensors(values, pad_val, _torch_dtype(dtype)))
    plain = [_plain(value) for value in values]
    sizes: list[int] = []
    kinds: set[type] = set()
    depths: set[int] = set()
    _survey(plain, 0, sizes, kinds, depths)
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        raise ValueError(f"only integers, floats or booleans can be padded; got {sorted(kind.__name__ for kind in kinds)}")
    if depths != {len(sizes)}:
        raise ValueError(f"all values must be lists of the same depth; got the depths {sorted(depths)}")
    kind = kinds.pop()
    if backend == "torch":
        whole: Any = torch.full(sizes, pad_val, dtype=_torch_dtype(dtype) or _DTYPES[kind])
    else:
        whole = np.full(sizes, pad_val, dtype=kind if dtype is None else dtype)
    _fill(whole, plain)
    return whole.tolist() if backend == "raw" else whole


def _of_tensors(values: list[Tensor], pad_val: float, dtype: torch.dtype | None) -> Tensor:
    if len({(value.ndim, value.dtype) for value in values}) > 1:
        raise ValueError("all tensors must have the same type and the same number of dimensions")
    sizes = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    whole = values[0].new_full([len(values), *sizes], pad_val, dtype=dtype or values[0].dtype)
    for number, value in enumerate(values):
        index: list[int | slice] = [number, *(slice(length) for length in value.shape)]
        whole[tuple(index)] = value
    return whole


def _in(backend: Backend, whole: Tensor) -> Any:
    return whole if backend == "torch" else whole.numpy(force=True) if backend == "numpy" else whole.tolist()


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    return torch.from_numpy(np.zeros(0, dtype)).dtype


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


def _fill(whole: Any, values: list[Any]) -> None:
    if whole.ndim == 1:
        whole[: len(values)] = torch.tensor(values, dtype=whole.dtype) if isinstance(whole, Tensor) else values
        return
    for part, inner in zip(whole, values, strict=False):
        _fill(part, inner)
