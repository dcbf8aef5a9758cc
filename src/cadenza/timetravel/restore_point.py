"""Copy the state of objects and restore it in place: attributes, containers, tensors and random generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable
from copy import copy, deepcopy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, MethodType, nn.Module, torch.device)
_LONGEST = 10_000  # a longer container holds data: only its order is state, and its entries are not visited


class RestorePoint:
    """The present state of objects, to restore it in the same objects.

    References to parts of them stay valid, such as those of a wrapper to the parameter groups of its inner optimizer. Modules,
    functions, classes and objects of the standard library, such as threads and files, are not changed.

    Args:
        roots: The objects.
        data: Whether all tensors are copied, to the host; else only one-dimensional integer tensors, such as indices.
        known: Further objects that are not changed.
    """

    def __init__(self, roots: Iterable[Any], *, data: bool, known: Iterable[Any] = ()) -> None:
        self._data = data
        self._seen: dict[int, Any] = {id(one): one for one in known}  # keeps each object alive, so that ids stay unique
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        pending = deque(roots)
        while pending:
            pending.extend(self._look_at(pending.popleft()))

    def _look_at(self, one: Any) -> Iterable[Any]:
        """Copy the state of one object; return the objects that it holds."""
        if isinstance(one, _LEAVES) or id(one) in self._seen:
            return ()
        self._seen[id(one)] = one
        if isinstance(one, Tensor):
            if self._data or (one.ndim == 1 and not one.is_floating_point()):
                self._tensors.append((one, one.detach().to("cpu", copy=True)))
            return ()
        if isinstance(one, torch.Generator):
            self._generators.append((one.set_state, one.get_state()))
            return ()
        if isinstance(one, random.Random):
            self._generators.append((one.setstate, one.getstate()))
            return ()
        if type(one).__module__.partition(".")[0] == "numpy":
            self._look_at_numpy(one)
            return ()
        if isinstance(one, list | dict | set | deque | tuple):
            if not isinstance(one, tuple):
                self._containers.append((one, copy(one)))
            if len(one) > _LONGEST:
                return ()
            return [*one.values()] if isinstance(one, dict) else [*one]
        if type(one).__module__.partition(".")[0] in sys.stdlib_module_names or not hasattr(one, "__dict__"):
            return ()
        self._attributes.append((vars(one), dict(vars(one))))
        return [*vars(one).values()]

    def _look_at_numpy(self, one: Any) -> None:
        name = type(one).__name__
        if name == "RandomState":
            self._generators.append((one.set_state, one.get_state()))
        elif name == "Generator":
            inner = one.bit_generator
            self._generators.append((lambda state: setattr(inner, "state", state), deepcopy(inner.state)))
        elif name == "ndarray" and one.ndim == 1 and one.dtype.kind in "biu":
            self._arrays.append((one, one.copy()))

    def restore(self) -> None:
        """Restore the state in place."""
        restore_in_place(self._attributes, self._containers, self._tensors)
        for array, values in self._arrays:
            array[:] = values
        for put, state in self._generators:
            put(state)


def restore_in_place(
    attributes: Iterable[tuple[dict[str, Any], dict[str, Any]]],
    containers: Iterable[tuple[Any, Any]],
    tensors: Iterable[tuple[Tensor, Tensor]],
) -> None:
    """Restore attributes, containers and tensors in place. Each pair is an object and the content to restore."""
    for current, before in attributes:
        for name in current.keys() - before.keys():
            del current[name]
        current.update(before)
    for container, content in containers:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)
    with torch.no_grad():
        for tensor, value in tensors:
            tensor.copy_(value)
