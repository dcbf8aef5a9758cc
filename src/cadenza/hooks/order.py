"""The names of callbacks, and their order: that of the list, changed only where a class asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from cadenza.errors import OrderError

if TYPE_CHECKING:
    from cadenza.hooks.moments import BaseCallback


def names_of(callbacks: Sequence[BaseCallback]) -> list[str]:
    """Return one name for each callback: its own, or that of its class, numbered from the second on."""
    names: list[str] = []
    for callback in callbacks:
        name = base = callback.name or type(callback).__name__
        number = 1
        while name in names:
            number += 1
            name = f"{base}#{number}"
        names.append(name)
    return names


def arranged(callbacks: Sequence[BaseCallback], names: Sequence[str]) -> list[int]:
    """Return the places of `callbacks` in the order in which they are called.

    A stable topological sort: each time, the first of the list that waits for nobody.

    Raises:
        OrderError: The declared ``after`` and ``before`` form a circle, which the message shows.
    """
    waits = {place: _earlier(place, callbacks) for place in range(len(callbacks))}
    order: list[int] = []
    while waits:
        ready = next((place for place, earlier in waits.items() if not earlier & waits.keys()), None)
        if ready is None:
            raise OrderError(_contradiction(waits, names))
        order.append(ready)
        del waits[ready]
    return order


def reasons(callbacks: Sequence[BaseCallback], names: Sequence[str]) -> list[str]:
    """Return why the order differs from the list, one sentence for each relation that is declared."""
    return [
        f"{names[place]} comes after {names[earlier]}"
        for place in range(len(callbacks))
        for earlier in sorted(_earlier(place, callbacks))
    ]


def _earlier(place: int, callbacks: Sequence[BaseCallback]) -> set[int]:
    """Return the places of the callbacks that must be called before the one at `place`."""
    this = callbacks[place]
    return {
        other
        for other, that in enumerate(callbacks)
        if other != place and (isinstance(that, tuple(this.after)) or isinstance(this, tuple(that.before)))
    }


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
