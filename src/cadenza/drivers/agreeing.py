"""Do what may fail on one rank, so that all ranks learn of the failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank, on every rank."""


def agreed(gather: Gather, act: Callable[[], T], failed: Callable[[int, str], Exception]) -> list[T]:
    """Call `act` on every rank, and return the results of all ranks. Every rank must call this.

    Args:
        gather: Exchanges the results. It may return those of the main process alone.
        act: Called once.
        failed: Makes the error for a failure on another rank, from its number and the error there.

    Raises:
        Exception: The error of `act` on this rank, or that of `failed`.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as raised:
        error = raised
    everyone = gather((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise failed(rank, problem)
    return [one for one, _ in everyone]
