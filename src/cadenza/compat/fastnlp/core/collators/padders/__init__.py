"""``fastNLP.core.collators.padders``: functions that make a field of a batch from a list of values.

`Collator` chooses the padding itself; pass a padder to ``set_pad(pad_fn=...)``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from cadenza.compat.fastnlp.core.collators.padding import Backend, padded

__all__ = [
    "NullPadder",
    "NumpyNumberPadder",
    "NumpySequencePadder",
    "NumpyTensorPadder",
    "Padder",
    "RawNumberPadder",
    "RawSequencePadder",
    "RawTensorPadder",
    "TorchNumberPadder",
    "TorchSequencePadder",
    "TorchTensorPadder",
    "get_padded_numpy_array",
]


class Padder:
    """The base class. Override `pad`, a static method; an object calls it with its own arguments.

    Args:
        pad_val: The value of the padding.
        dtype: The type of the result; None: that of the values.
    """

    def __init__(self, pad_val: float | None = 0, dtype: Any = None) -> None:
        self.pad_val: float | None = pad_val
        self.dtype: Any = dtype

    def __call__(self, batch_field: list[Any]) -> Any:
        """Return the field of a batch."""
        return self.pad(batch_field, self.pad_val, self.dtype)

    @staticmethod
    def pad(batch_field: list[Any], pad_val: Any = 0, dtype: Any = None) -> Any:
        """Return the field of a batch from the list of its values."""
        raise NotImplementedError("a Padder needs a static method pad(batch_field, pad_val=0, dtype=None)")


class NullPadder(Padder):
    """Keeps the list of the values. The arguments are ignored."""

    def __init__(self, ele_dtype: Any = None, pad_val: float | None = None, dtype: Any = None) -> None:
        super().__init__(pad_val, dtype)

    @staticmethod
    def pad(batch_field: list[Any], pad_val: Any = None, dtype: Any = None) -> Any:
        return batch_field


class _Numbers(Padder):
    """Pads numbers, or lists, arrays or tensors of numbers, as `Collator` does.

    Args:
        pad_val: The value of the padding.
        ele_dtype: The type of the values, for a check; it is the type of the result if `dtype` is None.
        dtype: The type of the result.

    Raises:
        TypeError: A type is not one of numbers.
    """

    backend: ClassVar[Backend]

    def __init__(self, pad_val: float = 0, ele_dtype: Any = None, dtype: Any = None) -> None:
        for name, given in (("ele_dtype", ele_dtype), ("dtype", dtype)):
            if given is not None and not _is_number(given):
                raise TypeError(f"{name} of {type(self).__name__} must be a type of numbers; got {given!r}")
        super().__init__(pad_val, ele_dtype if dtype is None else dtype)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        backend = cls.backend

        def pad(batch_field: list[Any], pad_val: float = 0, dtype: Any = None) -> Any:
            """Return the field of a batch from the list of its values."""
            return padded(batch_field, pad_val, dtype, backend)

        type.__setattr__(cls, "pad", staticmethod(pad))  # declared by the base class, with the same signature


class TorchNumberPadder(_Numbers):
    """``[1, 2]`` becomes a tensor."""

    backend: ClassVar[Backend] = "torch"


class TorchSequencePadder(_Numbers):
    """``[[1], [2, 3]]`` becomes a padded tensor.

    >>> TorchSequencePadder.pad([[1], [2, 3]], pad_val=-100)
    tensor([[   1, -100],
            [   2,    3]])
    """

    backend: ClassVar[Backend] = "torch"


class TorchTensorPadder(_Numbers):
    """A list of tensors or arrays becomes a padded tensor."""

    backend: ClassVar[Backend] = "torch"


class NumpyNumberPadder(_Numbers):
    """``[1, 2]`` becomes an array."""

    backend: ClassVar[Backend] = "numpy"


class NumpySequencePadder(_Numbers):
    """``[[1], [2, 3]]`` becomes a padded array."""

    backend: ClassVar[Backend] = "numpy"


class NumpyTensorPadder(_Numbers):
    """A list of arrays or tensors becomes a padded array."""

    backend: ClassVar[Backend] = "numpy"


class RawNumberPadder(_Numbers):
    """``[1, 2]`` stays a list."""

    backend: ClassVar[Backend] = "raw"


class RawSequencePadder(_Numbers):
    """``[[1], [2, 3]]`` becomes a list of lists of one length."""

    backend: ClassVar[Backend] = "raw"


class RawTensorPadder(_Numbers):
    """A list of arrays or tensors becomes a list of lists of one length."""

    backend: ClassVar[Backend] = "raw"


def get_padded_numpy_array(batch_field: list[Any], dtype: Any = None, pad_val: float = 0) -> Any:
    """Return nested lists of numbers as an array, padded to the longest."""
    return padded(batch_field, pad_val, dtype, "numpy")


def _is_number(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return True
    try:
        return np.dtype(dtype).kind in "biufc"
    except TypeError:
        return False
