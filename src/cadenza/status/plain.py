"""Nested values as JSON and tensors, and back. Reading them executes nothing.

JSON has no tuples, bytes, NaN, tensors, or keys other than strings. Each of these becomes an object with one key that starts
with ``$``. A dict of the user that looks like such an object becomes a list of pairs.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import CheckpointFormatError, StateError
from cadenza.status.tensor_parts import allowed, built, is_built_of_tensors, parts_of_tensor

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
        one.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for one in (source, target)
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

    def plain(value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if is_built_of_tensors(value):
            return {"$built": plain(_parts(value, path), path)}
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
            parts = [plain(part, f"{path}[{index}]") for index, part in enumerate(value)]
            return parts if isinstance(value, list) else {"$tuple": parts}
        if isinstance(value, Mapping):
            entries = [(key, plain(part, f"{path}.{key}" if path else str(key))) for key, part in value.items()]
            if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$")):
                return dict(entries)
            return {"$dict": [[plain(key, f"{path}.<key>"), part] for key, part in entries]}
        return plain(_number_of(value, path), path)

    return plain(tree, ""), tensors


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
