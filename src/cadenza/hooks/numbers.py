"""Checks of numbers in arguments."""

from __future__ import annotations

import operator
from numbers import Real
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


def check_real(name: str, value: object) -> None:
    """Raise `TypeError` unless an argument is a real number, such as NumPy's, and no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number; got {value!r}")


def whole_number(value: object) -> int | None:
    """Return an integer, NumPy's too, as an ``int``; None for anything else and for a bool."""
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
