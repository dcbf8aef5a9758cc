"""Tensors that are built of other tensors, such as the 8-bit states of torchao: their parts, and back.

PyTorch's protocol for such classes is ``__tensor_flatten__`` and ``__tensor_unflatten__``. A class is found among those that
``torch.serialization.add_safe_globals`` allows, and never imported by name, so that reading a file executes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import CheckpointFormatError


def is_built_of_tensors(value: object) -> bool:
    """Return whether `value` is a tensor of a class outside of torch that is built of other tensors."""
    kind = type(value)
    return isinstance(value, Tensor) and hasattr(kind, "__tensor_flatten__") and kind.__module__.partition(".")[0] != "torch"


def parts_of_tensor(tensor: Tensor) -> dict[str, Any]:
    """Return the class, the inner tensors, the context, the shape and the strides of such a tensor."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol of torch
    return {
        "class": name_of(type(tensor)),
        "tensors": {name: getattr(tensor, name) for name in names},
        "context": context,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A tensor of a class that this process does not allow, or has not imported."""

    kind: str


def built(parts: Mapping[str, Any]) -> Tensor | Unbuilt:
    """Return the tensor of these parts.

    Raises:
        CheckpointFormatError: The class does not accept the parts.
    """
    kind = allowed(parts["class"])
    if kind is None:
        return Unbuilt(parts["class"])
    shape, stride = torch.Size(parts["shape"]), tuple(parts["stride"])
    try:
        tensor: Tensor = kind.__tensor_unflatten__(dict(parts["tensors"]), parts["context"], shape, stride)  # type: ignore[attr-defined]
    except Exception as error:  # of the class, which checks its parts as it likes
        raise CheckpointFormatError(f"the parts of a {parts['class']} in the checkpoint do not fit: {error!r}") from None
    return tensor


def allowed(name: str) -> type | None:
    """Return the class of this name that torch may load; None if there is none."""
    given = (one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals())
    return next((one for one in given if isinstance(one, type) and name_of(one) == name), None)


def first_unbuilt(tree: Any) -> Unbuilt | None:
    """Return the first tensor in a nested value that could not be built."""
    if isinstance(tree, Mapping | list | tuple):
        parts = tree.values() if isinstance(tree, Mapping) else tree
        return next((found for part in parts if (found := first_unbuilt(part)) is not None), None)
    return tree if isinstance(tree, Unbuilt) else None


def name_of(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_array(value: object) -> bool:
    """Return whether a value is a tensor, or an array or a scalar of numpy. It does not import numpy."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, Tensor) or (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)))
