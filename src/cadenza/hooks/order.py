"""The names of callbacks, and their order: that of the list, changed only where a callback declares a relation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

from cadenza.errors import OrderError


class Phase(Enum):
    """Work that a callback does for the others. ``after`` and ``before`` name phases, so callbacks need not import each other.

    A class declares its work in ``phase``; its subclasses inherit it.
    """

    LENGTH = "sets the number of batches in an epoch"
    CLIP = "bounds the gradients"
    SCHEDULE = "steps a learning rate schedule"
    EVALUATE = "evaluates the model"
    SAVE = "writes checkpoints"


Relation = tuple[type[Any] | Phase, ...]
"""The callbacks of these classes and phases, as ``after`` and ``before`` name them."""


class Ordered(Protocol):
    """A callback, as far as its order is concerned."""

    name: str | None
    phase: Phase | None
    after: Relation
    before: Relation


def names_of(callbacks: Sequence[Ordered]) -> list[str]:
    """Return one name for each callback: its own, or that of its class, numbered from the second on."""
    names: dict[str, None] = {}
    numbers: dict[str, int] = {}
    for callback in callbacks:
        name = base = callback.name or type(callback).__name__
        while name in names:
            numbers[base] = numbers.get(base, 1) + 1
            name = f"{base}#{numbers[base]}"
        names[name] = None
    return list(names)


def arranged(callbacks: Sequence[Ordered], names: Sequence[str]) -> list[int]:
    """Return the indices of `callbacks` in the order in which they are called.

    A stable topological sort: it always takes the first callback of the list that waits for no other.

    Raises:
        OrderError: The relations form a circle. The message names its callbacks.
    """
    waiting = _relations(callbacks)
    order: list[int] = []
    while waiting:
        ready = next((index for index, earlier in waiting.items() if earlier.isdisjoint(waiting)), None)
        if ready is None:
            raise OrderError(_contradiction(waiting, names))
        order.append(ready)
        del waiting[ready]
    return order


def reasons(callbacks: Sequence[Ordered], names: Sequence[str]) -> list[str]:
    """Return why the order differs from the list: one sentence for each relation between two callbacks."""
    return [
        f"{names[index]} comes after {names[other]}"
        for index, earlier in _relations(callbacks).items()
        for other in sorted(earlier)
    ]


def _relations(callbacks: Sequence[Ordered]) -> dict[int, set[int]]:
    """Return, by the index of each callback, the indices of those that must be called before it."""
    alike: dict[tuple[type, Phase | None], list[int]] = {}
    for index, callback in enumerate(callbacks):
        alike.setdefault((type(callback), callback.phase), []).append(index)
    earlier: dict[int, set[int]] = {index: set() for index in range(len(callbacks))}
    for index, callback in enumerate(callbacks):
        earlier[index].update(_named(callback.after, alike))
        for later in _named(callback.before, alike):
            earlier[later].add(index)
    for index, others in earlier.items():
        others.discard(index)
    return earlier


def _named(relation: Relation, alike: dict[tuple[type, Phase | None], list[int]]) -> Iterable[int]:
    for one in relation:
        for (kind, phase), indices in alike.items():
            if phase is one if isinstance(one, Phase) else issubclass(kind, one):
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
