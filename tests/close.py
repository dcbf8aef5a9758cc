"""Numbers that two systems computed: the same operations in another order end in other last bits."""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Close(float):
    """A number that equals those near it. Of two rounded ones, one may be rounded up and the other down."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float | int) and math.isclose(self, other, rel_tol=1e-5, abs_tol=1e-5)

    __hash__ = None  # type: ignore[assignment]  # numbers that are equal to each other would need one hash


def closely(value: T) -> T:
    """Return lists, tuples and mappings with their floats made `Close`."""
    held: Any = value
    if isinstance(value, list | tuple):
        held = type(value)(map(closely, value))
    elif isinstance(value, dict):
        held = {key: closely(one) for key, one in value.items()}
    elif isinstance(value, float):
        held = Close(value)
    return cast("T", held)
