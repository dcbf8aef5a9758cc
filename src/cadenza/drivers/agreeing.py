"""Do what may fail on one rank, so that all ranks learn of the failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank, on every rank."""


def agreed(gather: Gather, act: Callable[[], T], failed: Callable[[int, str], Exception]) -> list[T]:
    """Call `act` on every rank, and return the results of all ranks. Every rank must call this.

    Args:
        gather: Exchanges the results.
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
    everyone = gather((result, _told(error)))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise failed(rank, problem)
    return [one for one, _ in everyone]


class Meeting(NamedTuple):
    """The ranks of a run, and how they exchange values. No rank but the first gets the values of all."""

    rank: int
    ranks: int
    gather_on_main: Gather
    """Returns the values of all ranks on the main process, and an empty list elsewhere. Every rank must call it."""
    broadcast: Callable[[Any], Any]
    """Returns the value of the main process. Every rank must call it."""


ALONE = Meeting(0, 1, lambda value: [value], lambda value: value)


def decided(
    meeting: Meeting, act: Callable[[], T], decide: Callable[[list[T]], R], failed: Callable[[int, str], Exception]
) -> R:
    """Call `act` on every rank and `decide` with all results on the main process; return its result on all ranks.

    Every rank must call this. The main process gets one message of each rank, and each rank gets one.

    Args:
        meeting: The ranks.
        act: Called once on each rank.
        decide: Called on the main process, unless `act` has failed on a rank.
        failed: Makes the error for a failure on another rank, from its number and the error there.

    Raises:
        Exception: The error of `act` or of `decide` on this rank, or that of `failed`.
    """
    own: T | None = None
    error: Exception | None = None
    try:
        own = act()
    except Exception as raised:
        error = raised
    everyone = meeting.gather_on_main((own, _told(error)))
    first = next(((rank, problem) for rank, (_, problem) in enumerate(everyone) if problem is not None), None)
    result: R | None = None
    if meeting.rank == 0 and first is None:
        try:
            result = decide([one for one, _ in everyone])
        except Exception as raised:
            error, first = raised, (0, str(_told(raised)))
    result, first = meeting.broadcast((result, first))
    if error is not None:
        raise error
    if first is not None:
        raise failed(*first)
    return result


def by_main(meeting: Meeting, act: Callable[[], T], failed: Callable[[int, str], Exception]) -> T:
    """Call `act` on the main process; return its result on all ranks. Every rank must call this.

    Raises:
        Exception: The error of `act` on the main process, that of `failed` elsewhere.
    """
    result: T | None = None
    error: Exception | None = None
    if meeting.rank == 0:
        try:
            result = act()
        except Exception as raised:
            error = raised
    result, problem = meeting.broadcast((result, _told(error)))
    if error is not None:
        raise error
    if problem is not None:
        raise failed(0, problem)
    return result


def _told(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
