"""Check arguments of drivers when they are given, before torch uses them."""

from __future__ import annotations


def check_switches(**given: object) -> None:
    """Raise `TypeError` if an argument is neither True nor False: torch takes the text ``"no"`` for True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def check_above_zero(name: str, value: object, unit: str) -> None:
    """Raise `TypeError` if an argument is no number, and `ValueError` if it is not above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of {unit} greater than 0; got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0 {unit}; got {value!r}")
