"""The names of callbacks, and their order: the order of the list, unless ``after`` or ``before`` of a callback changes it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from enum import Enum
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Protocol

from cadenza.errors import OrderError


class Phase(Enum):
    """The work of a callback. ``after`` and ``before`` name phases, so callbacks do not import each other.

    A class sets ``phase``, and its subclasses inherit it.
    """

    LENGTH = "sets the number of batches in an epoch"
    """Sets the number of batches in an epoch, as `Limit` does."""
    CLIP = "bounds the gradients"
    """Bounds the gradients, as `ClipGradients` does."""
    SCHEDULE = "steps a learning rate schedule"
    """Steps a learning rate schedule, as `LearningRate` does."""
    EVALUATE = "evaluates the model"
    """Evaluates the model, as `Evaluate` does."""
    SAVE = "writes checkpoints"
    """Writes checkpoints, as `Checkpoint` does."""


Relation = tuple[type[Any] | Phase, ...]
"""Classes and phases, as in ``after`` and ``before``."""


class Ordered(Protocol):
    """The attributes of a callback that its order depends on."""

    name: str | None
    phase: Phase | None
    after: Relation
    before: Relation


def names_of(callbacks: Sequence[Ordered]) -> list[str]:
    """Return a name for each callback: ``callback.name`` or that of its class, with a number from the second one on."""
    names: dict[str, None] = {}
    numbers: dict[str, int] = {}
    for callback in callbacks:
        names[name_beside(names, callback, numbers)] = None
    return list(names)


def name_beside(names: Container[str], callback: Ordered, numbers: dict[str, int] | None = None) -> str:
    """Return a name for a callback that is none of `names`. `numbers` holds the last number of each name, to go on from."""
    numbers = {} if numbers is None else numbers
    name = base = callback.name or type(callback).__name__
    while name in names:
        numbers[base] = numbers.get(base, 1) + 1
        name = f"{base}#{numbers[base]}"
    return name


def arranged(callbacks: Sequence[Ordered], names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the indices of `callbacks` in the order in which they are called, and why it differs from the list.

    The reasons are one sentence for each relation that the list does not meet. A stable topological sort: the next callback
    is the first one of the list of which all predecessors are done.

    Raises:
        OrderError: The relations form a cycle. The message names its callbacks.
    """
    predecessors = _relations(callbacks)
    reasons = [
        f"{names[index]} comes after {names[other]}{_because(callbacks[other])}"
        for index, earlier in predecessors.items()
        for other in sorted(earlier)
        if other > index
    ]
    missing = {index: len(earlier) for index, earlier in predecessors.items()}
    successors: dict[int, list[int]] = {}
    for index, earlier in predecessors.items():
        for other in earlier:
            successors.setdefault(other, []).append(index)
    ready = [index for index, count in missing.items() if not count]  # a sorted list is a heap
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for index in successors.get(order[-1], ()):
            missing[index] -= 1
            if not missing[index]:
                heappush(ready, index)
    if len(order) < len(callbacks):
        done = set(order)
        raise OrderError(
            _contradiction({index: predecessor for index, predecessor in predecessors.items() if index not in done}, names)
        )
    return order, reasons


def _because(first: Ordered) -> str:
    return "" if first.phase is None else f", which {first.phase.value}"


def _relations(callbacks: Sequence[Ordered]) -> dict[int, set[int]]:
    """Return, by the index of each callback, the indices of those that must be called before it."""
    alike: dict[tuple[type, Phase | None], list[int]] = {}
    for index, callback in enumerate(callbacks):
        alike.setdefault((type(callback), callback.phase), []).append(index)
    earlier: dict[int, set[int]] = {index: set() for index in range(len(callbacks))}
    for index, callback in enumerate(callbacks):
        earlier[index].update(_named(callback.after, alike))
        for later in _named(callback.before, alike):
            if type(callbacks[later]) is not type(callback):  # "before all": two of one class keep the order of the list
                earlier[later].add(index)
    for index, others in earlier.items():
        others.discard(index)
    return earlier


def _named(relation: Relation, alike: dict[tuple[type, Phase | None], list[int]]) -> Iterable[int]:
    for element in relation:
        for (kind, phase), indices in alike.items():
            if phase is element if isinstance(element, Phase) else issubclass(kind, element):
                yield from indices


def _contradiction(waits: dict[int, set[int]], names: Sequence[str]) -> str:
    path = [next(iter(waits))]
    while path.count(path[-1]) < 2:
        path.append(min(waits[path[-1]] & waits.keys()))
    circle = path[path.index(path[-1]) :]
    return (
        "the callbacks' order contradicts itself: "
        + ", and ".join(f"{names[late]} must come after {names[early]}" for late, early in pairwise(circle))
        + ". Remove one of these from the classes' `after` and `before`."
    )
