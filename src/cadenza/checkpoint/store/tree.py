"""A tree of plain values and tensors as JSON beside tensors: nothing in it can run when it is read.

JSON knows no tuples, no keys but strings, no bytes, no NaN, and no tensors. Each of these is written as an object with one key
that starts with ``$``; a dict of the user's that looks like one is written as pairs.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cadenza.checkpoint.store.shards import Shard
from cadenza.drivers.sharding import is_sharded
from cadenza.errors import CheckpointFormatError, StateError


def encode(tree: Any, shards: dict[str, Shard] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Return what JSON can hold, and the tensors by the name under which it mentions them.

    Tensors are copied to the host: what is encoded does not change any more. Of DTensors this rank's part is put into `shards`.

    Raises:
        StateError: A value is of a type that cannot be saved; the message names its place.

    >>> encode({"step": 3, "range": (1, 2), "weight": torch.ones(2)})
    ({'step': 3, 'range': {'$tuple': [1, 2]}, 'weight': {'$tensor': 'weight'}}, {'weight': tensor([1., 1.])})
    """
    tensors: dict[str, Tensor] = {}
    return _Encoder(tensors, shards).encode(tree, ""), tensors


def decode(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `encode` was given; `tensors` are those of both kinds.

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


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host that shares memory with nothing."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class _Encoder:
    """Takes a tree apart."""

    def __init__(self, tensors: dict[str, Tensor], shards: dict[str, Shard] | None) -> None:
        self.tensors, self.shards = tensors, shards

    def encode(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._encode_tensor(value, place)
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, list):
            return [self.encode(part, f"{place}[{index}]") for index, part in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": [self.encode(part, f"{place}[{index}]") for index, part in enumerate(value)]}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, place)
        if getattr(value, "shape", None) == () and isinstance(number := value.item(), bool | int | float | bytes | str):
            return self.encode(number, place)  # numpy's
        raise StateError(
            f"{place or 'the value'} cannot be saved: expected None, bool, int, float, str, bytes, tensors, or lists, tuples "
            f"and dicts of them; got {type(value).__name__}"
        )

    def _encode_tensor(self, tensor: Tensor, place: str) -> Any:
        if not is_sharded(tensor):
            name = _free_name(place or "value", self.tensors, self.shards or {})
            self.tensors[name] = host_copy(tensor)
            return {"$tensor": name}
        if self.shards is None:
            raise StateError(
                f"{place or 'the value'} cannot be saved here: it is in shards, of which this rank holds one. Use the callback "
                "Checkpoint, to which all ranks write; or tensor.full_tensor(), on every rank"
            )
        name = _free_name(place or "value", self.tensors, self.shards)
        self.shards[name] = Shard.of(tensor)
        return {"$shards": name}

    def _encode_mapping(self, value: Mapping[Any, Any], place: str) -> Any:
        plain_keys = all(type(key) is str for key in value)
        if plain_keys and not (len(value) == 1 and next(iter(value)).startswith("$")):
            return {key: self.encode(part, f"{place}.{key}" if place else key) for key, part in value.items()}
        pairs = [[self.encode(key, f"{place}.<key>"), self.encode(part, f"{place}.{key}")] for key, part in value.items()]
        return {"$dict": pairs}


def _free_name(place: str, *taken: Mapping[str, object]) -> str:
    """Return the place, with a number where two places read alike: ``{"a.b": x, "a": {"b": y}}``."""
    name, number = place, 1
    while any(name in tensors for tensors in taken):
        number += 1
        name = f"{place}#{number}"
    return name


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Any]) -> Any:
    match tag:
        case "$tensor" | "$shards":
            if content not in tensors:
                raise CheckpointFormatError(f"the checkpoint mentions a tensor {content!r} that it does not hold")
            return tensors[content]
        case "$tuple":
            return tuple(decode(part, tensors) for part in content)
        case "$dict":
            return {decode(key, tensors): decode(part, tensors) for key, part in content}
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content)
        case _:
            raise CheckpointFormatError(f"the checkpoint holds a value with the unknown tag {tag!r}")


def same(left: Any, right: Any) -> bool:
    """Return whether two trees are equal: tensors bit for bit, NaN to NaN."""
    return first_difference(left, right) is None


def first_difference(left: Any, right: Any, place: str = "") -> str | None:
    """Return the place and kind of the first difference of two trees; None if there is none."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return None if _same_bits(left, right) else f"{place}: {_brief(left)} and {_brief(right)}"
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return f"{place}: keys {sorted(map(str, left.keys() ^ right.keys()))} are only in one of the two"
        found = (first_difference(left[key], right[key], f"{place}.{key}" if place else str(key)) for key in left)
        return next((difference for difference in found if difference), None)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return f"{place}: {len(left)} entries and {len(right)}"
        found = (first_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((difference for difference in found if difference), None)
    if left == right or (left != left and right != right):  # NaN differs from itself
        return None
    return f"{place}: {left!r} and {right!r}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))


def _brief(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" {tensor.flatten()[:3].tolist()}..." if tensor.numel() else "")
