"""The state of a callback that has no ``state_dict``: its attributes with plain values that changed during the run."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from cadenza.errors import StateError
from cadenza.status.plain import encode

_ARRAY, _SET, _DEQUE = "an array of NumPy", "a set", "a deque"
"""The keys that mark values which a checkpoint holds in another form."""


def plain_attributes(thing: object) -> dict[str, Any]:
    """Return copies of the attributes that a checkpoint can hold.

    These are numbers, strings, tensors, and lists and dicts of them. Arrays of NumPy, sets and deques are packed: `put_back`
    unpacks them.
    """
    found = ((name, _packed(value)) for name, value in vars(thing).items())
    return {name: deepcopy(value) for name, value in found if _is_plain(value)}


def changed_since(before: Mapping[str, Any], thing: object) -> dict[str, Any]:
    """Return the plain attributes that differ from `before`. Arguments of the constructor stay as they are in the new run."""
    now = plain_attributes(thing)
    return {name: value for name, value in now.items() if name not in before or not _equal(before[name], value)}


def put_back(state: Mapping[str, Any], thing: object) -> None:
    """Set the attributes that `changed_since` returned."""
    for name, value in state.items():
        setattr(thing, name, _unpacked(value))


def _packed(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim:
        try:
            return {_ARRAY: torch.from_numpy(numpy.array(value))}  # a copy, since torch refuses some layouts
        except TypeError:  # such as an array of objects
            return value
    if type(value) in (list, tuple):
        return type(value)(map(_packed, value))
    if type(value) is dict:
        return {key: _packed(one) for key, one in value.items()}
    if type(value) is deque:
        return {_DEQUE: (value.maxlen, list(map(_packed, value)))}
    return {_SET: sorted(value, key=repr)} if type(value) is set else value


def _unpacked(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_unpacked, value))
    if type(value) is not dict:
        return value
    if len(value) == 1:
        (kind, content), *_ = value.items()
        if kind == _ARRAY:
            return content.cpu().numpy().copy()
        if kind == _SET:
            return set(content)
        if kind == _DEQUE:
            return deque(map(_unpacked, content[1]), content[0])
    return {key: _unpacked(one) for key, one in value.items()}


def _is_plain(value: object) -> bool:
    try:
        encode(value, copy=lambda tensor: None)
    except (StateError, RecursionError):
        return False
    return True


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other
