"""Nested values as JSON and tensors, and back. Reading them executes nothing.

JSON has no tuples, bytes, NaN, tensors, or keys other than strings. Each of these becomes an object with one key that starts
with ``$``. A dict of the user that looks like such an object becomes a list of pairs.

Tensors that are built of other tensors, such as the 8-bit states of torchao, are saved as their parts. PyTorch's protocol for
such classes is ``__tensor_flatten__`` and ``__tensor_unflatten__``. A class is found among those that
``torch.serialization.add_safe_globals`` allows, and never imported by name.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import CheckpointFormatError, StateError

PIECE = 1 << 25  # bytes


def host_copy(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """Return a contiguous copy on the host that shares memory with nothing. The numbers are copied once.

    Args:
        tensor: The tensor.
        into: A contiguous tensor on the host of the same shape and number format, which gets the numbers and is returned.
    """
    detached = tensor.detach()
    if detached.layout is not torch.strided:
        return detached.to("cpu", copy=True)
    new = torch.empty(detached.shape, dtype=detached.dtype, device="cpu") if into is None else into
    return new.copy_(detached) if not detached.is_cuda or detached.nbytes < PIECE // 32 else _in_pieces(detached, new)


def _in_pieces(source: Tensor, target: Tensor) -> Tensor:
    """Copy from the device through a piece of pinned memory, several times as fast as to memory that is not pinned."""
    pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next time
    bytes_of, bytes_to = (
        kind.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for kind in (source, target)
    )
    for at in range(0, bytes_to.numel(), PIECE):
        piece = bytes_of[at : at + PIECE]
        bytes_to[at : at + PIECE] = pinned[: piece.numel()].copy_(piece)
    return target


def encode(tree: Any, copy: Callable[[Tensor], Any] = host_copy) -> tuple[Any, dict[str, Any]]:
    """Return a tree as JSON can hold it, and a copy of each tensor by the name under which the JSON mentions it.

    Args:
        tree: None, bool, int, float, str, bytes, number formats, tensors, and nested lists, tuples and mappings of them.
        copy: Copies a tensor, so that later changes of the tensor do not reach the result.

    Raises:
        StateError: The type of a value cannot be saved; the message names the path to the value.

    >>> encode({"step": 3, "range": (1, 2), "weight": torch.ones(2)})
    ({'step': 3, 'range': {'$tuple': [1, 2]}, 'weight': {'$tensor': 'weight'}}, {'weight': tensor([1., 1.])})
    """
    tensors: dict[str, Any] = {}
    return _plain(tree, "", tensors, copy), tensors


def _plain(value: Any, path: str, tensors: dict[str, Any], copy: Callable[[Tensor], Any]) -> Any:
    """Return a value as `encode` does, and put copies of its tensors into `tensors`."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if is_built_of_tensors(value):
        return {"$built": _plain(_parts(value, path), path, tensors, copy)}
    if isinstance(value, Tensor):
        base = path or "value"
        names = chain([base], (f"{base}#{number}" for number in count(2)))  # {"a.b": x, "a": {"b": y}} have equal paths
        name = next(name for name in names if name not in tensors)
        tensors[name] = copy(value)
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list | tuple):
        parts = [_plain(part, f"{path}[{index}]", tensors, copy) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, Mapping):
        entries = [(key, _plain(part, f"{path}.{key}" if path else str(key), tensors, copy)) for key, part in value.items()]
        if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$")):
            return dict(entries)
        return {"$dict": [[_plain(key, f"{path}.<key>", tensors, copy), part] for key, part in entries]}
    return _plain(_number_of(value, path), path, tensors, copy)


def _number_of(value: Any, path: str) -> bool | int | float | bytes | str:
    """Return the value of a scalar of NumPy. Raises StateError for any other object."""
    item = getattr(value, "item", None) if getattr(value, "shape", None) == () else None
    if callable(item) and isinstance(number := item(), bool | int | float | bytes | str):
        return number
    raise StateError(
        f"{path or 'the value'} cannot be saved: expected None, bool, int, float, str, bytes, tensors, or lists, tuples "
        f"and dicts of them; got {type(value).__name__}{_instead(value)}"
    )


def _instead(value: object) -> str:
    """Return what to save instead of an array, a set or a deque."""
    if isinstance(value, set | frozenset | deque):
        return ". Save it as a list"
    return ". Save torch.as_tensor(array); .numpy() restores it" if hasattr(value, "__array__") else ""


def _parts(tensor: Any, path: str) -> dict[str, Any]:
    parts = parts_of_tensor(tensor)
    if allowed(parts["class"]) is None:
        raise StateError(
            f"{path or 'the value'} cannot be saved: its class {parts['class']} is not among those that torch may load. If you "
            f"trust it, call torch.serialization.add_safe_globals([{type(tensor).__name__}]) before the training and before a "
            "resume."
        )
    return parts


def decode(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `encode` was given; `tensors` are the tensors by name.

    Raises:
        CheckpointFormatError: A tag is unknown, or a tensor is missing.
    """
    if isinstance(plain, list):
        return [decode(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1 and (tag := next(iter(plain))).startswith("$"):
        return _decode_tagged(tag, plain[tag], tensors)
    return {key: decode(part, tensors) for key, part in plain.items()}


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Any]) -> Any:
    match tag:
        case "$tensor" | "$shards":  # older versions wrote the second one
            if content not in tensors:
                raise CheckpointFormatError(f"the checkpoint mentions a tensor {content!r} that it does not hold")
            return tensors[content]
        case "$tuple":
            return tuple(decode(part, tensors) for part in content)
        case "$dict":
            return {decode(key, tensors): decode(part, tensors) for key, part in content}
        case "$float":
            return float(content)
        case "$dtype":
            dtype = getattr(torch, content, None) if isinstance(content, str) else None
            if not isinstance(dtype, torch.dtype):
                raise CheckpointFormatError(f"the checkpoint holds a number format {content!r}, which torch does not have")
            return dtype
        case "$built":
            return built(decode(content, tensors))
        case "$bytes":
            return base64.b64decode(content)
        case _:
            raise CheckpointFormatError(f"the checkpoint holds a value with the unknown tag {tag!r}")


def same(left: Any, right: Any) -> bool:
    """Return whether two trees are equal: tensors bit for bit, NaN to NaN."""
    return first_difference(left, right) is None


def first_difference(left: Any, right: Any, path: str = "") -> str | None:
    """Return the path and kind of the first difference of two trees; None if there is none."""
    if is_built_of_tensors(left) and is_built_of_tensors(right):
        return first_difference(parts_of_tensor(left), parts_of_tensor(right), path)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return None if _same_bits(left, right) else f"{path}: {_brief(left)} and {_brief(right)}"
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return f"{path}: keys {sorted(map(str, left.keys() ^ right.keys()))} are only in one of the two"
        found = (first_difference(left[key], right[key], f"{path}.{key}" if path else str(key)) for key in left)
        return next((difference for difference in found if difference), None)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return f"{path}: {len(left)} entries and {len(right)}"
        found = (first_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((difference for difference in found if difference), None)
    if left == right or (left != left and right != right):  # NaN differs from itself
        return None
    return f"{path}: {left!r} and {right!r}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))


def _brief(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" {tensor.flatten()[:3].tolist()}..." if tensor.numel() else "")


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
    given = (kind[0] if isinstance(kind, tuple) else kind for kind in torch.serialization.get_safe_globals())
    return next((item for item in given if isinstance(item, type) and name_of(item) == name), None)


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


# -- ``run.state``: the user's own values, saved in checkpoints -------------------------------------


class State(dict[str, Any]):
    """A dict with entries that are attributes too. A checkpoint can save every entry.

    >>> state = State(best=0.5)
    >>> state.rounds = [1, 2]
    >>> state
    {'best': 0.5, 'rounds': [1, 2]}
    >>> state.model = print
    Traceback (most recent call last):
        ...
    cadenza.errors.StateError: run.state['model'] cannot be saved: expected None, bool, int, float, str, a tensor, or lists \
and dicts of them; got builtin_function_or_method
    """

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__()
        self.update(*arguments, **values)

    def __setitem__(self, key: str, value: Any) -> None:
        check_savable(value, f"run.state[{key!r}]")
        super().__setitem__(key, value)

    def update(self, *arguments: Any, **values: Any) -> None:
        for key, value in dict(*arguments, **values).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"run.state has no {name!r}; it has {list(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"run.state has no {name!r}; it has {list(self)}") from None


def check_savable(value: object, path: str) -> None:
    """Raise `StateError`, which names the path to the value, unless a checkpoint can hold `value`."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            check_savable(part, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise StateError(f"{path} cannot be saved: expected keys of type str; got {key!r}")
            check_savable(part, f"{path}[{key!r}]")
    else:
        raise StateError(
            f"{path} cannot be saved: expected None, bool, int, float, str, a tensor, or lists and dicts of them; got "
            f"{type(value).__name__}"
        )
