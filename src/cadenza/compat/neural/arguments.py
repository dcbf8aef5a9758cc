"""Checks of arguments, for both versions of NeMo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

from cadenza.compat.neural.logs import logging
from cadenza.errors import nearest


def frequency(name: str, every: int) -> int:
    """Return a checked frequency; -1 stands for never.

    Raises:
        ValueError: It is neither -1 nor a positive integer.
    """
    if not isinstance(every, int) or (every < 1 and every != -1):
        raise ValueError(f"{name} must be a whole number of at least 1, or -1 for never; got {every!r}")
    return every


def limit(name: str, value: float | None) -> int | None:
    """Return a limit of a training as a whole number; None is no limit. NeMo counts up to a limit such as 2.5, which is 3.

    Raises:
        TypeError: It is not a number.
        ValueError: It is 0 or less.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, or None; got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be at least 1; got {value!r}. To evaluate without a training, call nf.eval([...]).")
    return math.ceil(value)


def warn_without_effect(owner: str, given: Mapping[str, object], without_effect: Iterable[str], known: Iterable[str]) -> None:
    """Warn about arguments of NeMo that have no effect here.

    Args:
        owner: The function or class.
        given: Arguments that it does not accept.
        without_effect: The ones that NeMo accepts.
        known: The names that it accepts.

    Raises:
        TypeError: NeMo does not accept one of them either.
    """
    for name in given:
        if name not in without_effect:
            hint = nearest(name, [*known, *without_effect])
            raise TypeError(f"{owner} has no argument {name!r}.{hint} It has {', '.join(known)}")
    if given:
        logging.warning("%s: these arguments have no effect here: %s", owner, ", ".join(given))


def names_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments."""
    return [name for name in signature(function).parameters if name not in ("self", "ignored", "unknown")]
