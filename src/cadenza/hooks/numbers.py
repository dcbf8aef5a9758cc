"""Checks of whole numbers in arguments."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def at_least(least: int, name: str, value: object, instead: str = "") -> int:
    """Return an integer argument, NumPy's too, as an ``int``.

    Args:
        least: The smallest valid number.
        name: The name of the argument, for the message.
        value: The argument.
        instead: Other valid values, for the message, such as ``"None or "``.

    Raises:
        ValueError: `value` is not an integer, is a bool, or is too small.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be {instead}a whole number of at least {least}; got {value!r}")
    return number


def at_least_or_none(least: int, name: str, value: object) -> int | None:
    """Return an integer argument as an ``int``, or None. See `at_least`."""
    return None if value is None else at_least(least, name, value, "None or ")


def whole_number(value: object) -> int | None:
    """Return an integer, NumPy's too, as an ``int``; None for anything else and for a bool."""
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
