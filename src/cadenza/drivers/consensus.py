"""Do what may fail on one rank, so that all ranks learn of the failure."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank, on every rank."""
Failed = Callable[[int, str], Exception]
"""Makes the error for a failure on another rank, from its number and the error there."""


def agreed(gather: Gather, act: Callable[[], T], failed: Failed) -> list[T]:
    """Call `act` on every rank, and return the results of all ranks. Every rank must call this.

    Args:
        gather: Exchanges the results.
        act: Called once.
        failed: Makes the error for a failure on another rank.

    Raises:
        Exception: The error of `act` on this rank, or that of `failed`.
    """
    own, error = _attempt(act)
    everyone = gather((own, _told(error)))
    _raise_first(error, [problem for _, problem in everyone], failed)
    return [result for result, _ in everyone]


class Meeting(NamedTuple):
    """The ranks of a run, and how they exchange values. No rank but the first gets the values of all."""

    rank: int
    ranks: int
    gather_on_main: Gather
    """Returns the values of all ranks on the main process, and an empty list elsewhere. Every rank must call it."""
    broadcast: Callable[[Any], Any]
    """Returns the value of the main process. Every rank must call it."""
    leave: Callable[[], object] = lambda: None
    """Ends the exchanges, after an error on this rank: other ranks that wait for a value of it get an error at once."""


LEFT = "its run failed, which closed the connection"  # by this term, the error that follows is one of lost contact

Silent = Callable[[Sequence[int]], list[int]]
"""Gets the ranks for which a rank waits, once an interval; returns those of them that post no more."""

Watch = Callable[[], tuple[float, Silent]]
"""Called at the start of a wait; returns the seconds between two looks, and how to look."""

ALONE = Meeting(0, 1, lambda value: [value], lambda value: value)


def over_store(store: Any, name: str, rank: int, ranks: int, watch: Watch | None = None) -> Meeting:
    """Return a meeting through a store. If a rank is late, calls of this meeting fail from then on, and nothing else.

    The store does not notice that a rank was killed. With `watch`, a rank that waits looks at the posts of those it waits for.

    Args:
        store: A client of a store that all ranks reach, for this meeting alone. Its time limit is that of a call.
        name: The prefix of the keys, the same on all ranks.
        rank: The rank of this process.
        ranks: How many there are.
        watch: How a rank that waits looks at the posts of others.
    """
    numbers, failures = count(), list[Exception]()
    sent = list[str]()  # keys of this rank, which the others have read when the next value of theirs is here

    def call(exchange: Callable[[str, Any], Any], value: Any) -> Any:
        if failures:
            raise RuntimeError(f"an earlier exchange of the ranks failed: {failures[0]}")
        number = next(numbers)
        try:
            return exchange(f"{name}/{number}", value)
        except Exception as error:
            end(error, number + 1)
            raise

    def end(error: Exception, number: int) -> None:
        failures.append(error)
        for later in (number, number + 1):  # in one of them the others wait for this rank
            with suppress(RuntimeError, ValueError):  # torch's errors of a store
                put(f"{name}/{later}", str(error), None)

    def leave() -> None:
        if not failures:
            end(RuntimeError(LEFT), next(numbers))

    def put(key: str, problem: str, value: Any) -> None:
        store.set(f"{key}/{rank}", pickle.dumps((problem, value)))

    arrived = partial(_arrived, store, watch, failures)

    def value_in(content: bytes) -> Any:
        problem, value = pickle.loads(content)
        if problem:
            raise RuntimeError(f"the exchange failed on another rank: {problem}")
        return value

    def gather(key: str, value: Any) -> list[Any]:
        if rank:
            put(key, "", value)
            sent.append(f"{key}/{rank}")
            return []
        keys = {other: f"{key}/{other}" for other in range(1, ranks)}
        everyone = [value, *map(value_in, arrived(keys))]
        delete_sent()
        return everyone

    def broadcast(key: str, value: Any) -> Any:
        if rank:
            received = value_in(arrived({0: f"{key}/0"})[0])
            delete_sent()
            return received
        put(key, "", value)
        sent.append(f"{key}/0")
        return value

    def delete_sent() -> None:
        while sent:
            store.delete_key(sent.pop())

    return Meeting(rank, ranks, partial(call, gather), partial(call, broadcast), leave)


def _arrived(store: Any, watch: Watch | None, failures: Sequence[Exception], keys: Mapping[int, str]) -> list[bytes]:
    """Wait for the values of ranks, and return them."""
    if watch is not None:
        every_s, silent = watch()
        deadline = time.monotonic() + store.timeout.total_seconds()
        while time.monotonic() < deadline and not _there(store, [*keys.values()], every_s):
            if failures:  # this rank has left
                raise failures[0]
            if gone := silent([other for other, key in keys.items() if not store.check([key])]):
                raise RuntimeError(f"lost the connection to rank {gone[0]}, which posts no more")
    return cast("list[bytes]", store.multi_get([*keys.values()]))


def _there(store: Any, keys: list[str], wait_s: float) -> bool:
    """Wait for keys, at most for a short time; return whether all of them are there."""
    deadline, pause_s = time.monotonic() + wait_s, 0.002
    while not (there := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(pause_s)  # not store.wait, which prints a warning each time
        pause_s = min(2 * pause_s, wait_s / 4)
    return bool(there)


def decided(meeting: Meeting, act: Callable[[], T], decide: Callable[[list[T]], R], failed: Failed) -> R:
    """Call `act` on every rank and `decide` with all results on the main process; return its result on all ranks.

    Every rank must call this. The main process gets one message of each rank, and each rank gets one.

    Args:
        meeting: The ranks.
        act: Called once on each rank.
        decide: Called on the main process, unless `act` has failed on a rank.
        failed: Makes the error for a failure on another rank.

    Raises:
        Exception: The error of `act` or of `decide` on this rank, or that of `failed`.
    """
    own, error = _attempt(act)
    everyone = meeting.gather_on_main((own, _told(error)))
    result, problems = None, [problem for _, problem in everyone]
    if meeting.rank == 0 and not any(problems):
        result, error = _attempt(lambda: decide([rank_value for rank_value, _ in everyone]))
        problems = [_told(error)]
    result, problems = meeting.broadcast((result, problems))
    _raise_first(error, problems, failed)
    return cast("R", result)


def by_main(meeting: Meeting, act: Callable[[], T], failed: Failed) -> T:
    """Call `act` on the main process; return its result on all ranks. Every rank must call this.

    Raises:
        Exception: The error of `act` on the main process, that of `failed` elsewhere.
    """
    result, error = _attempt(act) if meeting.rank == 0 else (None, None)
    result, problem = meeting.broadcast((result, _told(error)))
    _raise_first(error, [problem], failed)
    return cast("T", result)


def by_main_from_all(meeting: Meeting, arriving: Iterator[T], act: Callable[[Iterator[T]], R], failed: Failed) -> R | None:
    """Call `act` with what arrives on the main process, as of `Driver.in_turns`; return its result there.

    Every rank must call this.

    Raises:
        Exception: The error of `act` on the main process, that of `failed` elsewhere.
    """
    result, error = _attempt(lambda: act(arriving)) if meeting.rank == 0 else (None, None)
    for _ in arriving:  # the other ranks send theirs, also after an error of the main process
        pass
    _raise_first(error, [meeting.broadcast(_told(error))], failed)
    return result


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _raise_first(own: Exception | None, problems: Sequence[str | None], failed: Failed) -> None:
    """Raise the error of this rank, or else that for the first of the problems of all ranks, if there are any."""
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise failed(rank, problem)


def _told(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
