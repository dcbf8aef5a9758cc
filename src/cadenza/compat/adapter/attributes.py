"""The state of a callback that has no ``state_dict``: its attributes that changed during the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cadenza.compat.adapter.packing import packed, unpacked
from cadenza.errors import StateError

_HOLDERS = (list, tuple, dict, set, frozenset, deque)
"""Containers. One that a checkpoint cannot hold may still contain data."""


def plain_attributes(thing: object) -> dict[str, Any]:
    """Return copies of the attributes that a checkpoint can hold, as `packed` returns them.

    These are numbers, strings, tensors, arrays and random generators of NumPy, enumerations, and containers and dataclasses of
    them.
    """
    return dict(_plain(thing))


def _plain(thing: object) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(thing).items()):
        try:
            yield name, packed(value)
        except (StateError, RecursionError):  # an open file, a model, a list that holds itself
            continue


def changed_since(before: Mapping[str, Any], thing: object) -> dict[str, Any]:
    """Return the plain attributes that differ from `before`. Constructor arguments keep the values of the new run."""
    return differing(before, plain_attributes(thing))


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs between two results of `plain_attributes`, with the values of the second one."""
    return {name: value for name, value in now.items() if name not in before or not _equal(before[name], value)}


def put_back(state: Mapping[str, Any], thing: object) -> None:
    """Set the attributes that `changed_since` returned."""
    for name, value in state.items():
        setattr(thing, name, unpacked(value, vars(thing).get(name)))


def left_out(thing: object, plain: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the containers among the attributes that are not in `plain`, each with its identity and its length."""
    others = {name: value for name, value in vars(thing).items() if name not in plain}
    return {name: (id(value), len(value)) for name, value in others.items() if isinstance(value, _HOLDERS)}


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and value.device == other.device and torch.equal(value, other)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return type(value) is type(other) and len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    return type(value) is type(other) and (value == other or (value != value and other != other))
