"""The metric buffer: logged values that are not in a record yet, and records with numbers that are still on the device."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from cadenza.records.record import RESERVED, Loggable, Media, Record
from cadenza.records.scalars import (
    EXTREMES,
    ArrivingNumbers,
    IntervalSums,
    Reduce,
    Reduced,
    as_numbers,
    checked_reduce,
    extremes,
    mixed,
    put_extremes,
    widened,
)
from cadenza.status.progress import Counters

_EXCHANGED = 24  # numbers of a record that ranks exchange together with their requests


class Ranks(Protocol):
    """The part of a driver that reduces numbers over ranks."""

    device: torch.device
    rank: int
    world_size: int
    tensor_parallel: int

    @property
    def data_world_size(self) -> int: ...
    @property
    def counts(self) -> bool: ...

    def gather(self, value: Any) -> list[Any]: ...
    def broadcast(self, value: Any, source: int = 0) -> Any: ...
    def reduce(self, value: Tensor, how: Literal["mean", "sum", "max", "min"] = "mean") -> Tensor: ...


class MetricBuffer:
    """Collects logged values, and returns them as records once their numbers have left the device."""

    def __init__(self) -> None:
        self._open: dict[str, Loggable | Reduced] = {}
        self._ways: dict[str, Reduce | None] = {}  # how each name was reduced at first; None for the default
        self._plain = True
        self._closed: deque[_OnTheWay | Record] = deque()
        self._aside: tuple[Counters, dict[str, Loggable | Reduced], bool] | None = None
        self.idle: bool = True
        """Whether it holds neither values nor records."""

    def add(self, name: str, value: object) -> None:
        """Add a value to the open record; a later one of the same name replaces it. Raises TypeError or ValueError."""
        if not isinstance(name, str) or (name in RESERVED and not isinstance(value, Media)):
            raise _wrong_name(name)
        if (how := self._ways.setdefault(name, None)) is not None:
            raise mixed(name, how, None)
        if type(value) is not float:
            value = _loggable(name, value)
            self._plain &= not isinstance(value, Tensor | Media)
        self._open[name] = value
        self.idle = False

    def add_reduced(self, name: str, value: object, how: object, weight: object = None) -> None:
        """Add a value to those of the same name in the open record, over which and over ranks it is reduced.

        Raises:
            TypeError: A value or a weight is no number.
            ValueError: `how` is unknown or another one than before, or the weight is negative or without a mean.
        """
        if not isinstance(name, str) or name in RESERVED:
            raise _wrong_name(name)
        way = checked_reduce(how)
        if weight is not None and way != "mean":
            raise ValueError(f"weight= is for reduce='mean'; got it for {name!r} with reduce={way!r}")
        if isinstance(value, Media):
            raise TypeError(f"reduce= is for numbers; got {name!r} with a {type(value).__name__}")
        if self._ways.setdefault(name, way) != way:
            raise mixed(name, self._ways[name], way)
        known = self._open.get(name)
        number, weight = _loggable(name, value), 1 if weight is None else _loggable(f"weight of {name}", weight)
        if not isinstance(weight, Tensor) and not cast("float", weight) >= 0:
            raise ValueError(f"the weight of {name!r} must be at least 0; got {weight!r}")
        reduced = known if type(known) is Reduced else Reduced(way)
        reduced.add(number, weight)
        self._open[name], self._plain, self.idle = reduced, False, False

    def add_mean(self, name: str, total: float | Tensor, weight: float | Tensor) -> None:
        """Add the sums of a mean over several steps, unless a hook logs a number with this name in the open record."""
        logged = self._open.get(name)
        if logged is None or isinstance(logged, IntervalSums):
            self._open[name] = IntervalSums("mean", total, weight)
            self._plain = self.idle = False

    def logged_by_hooks(self, names: Iterable[str]) -> list[str]:
        """Return those of the names under which a hook has logged a number, on this rank."""
        return [name for name in names if name in self._ways]

    @property
    def holds_numbers(self) -> bool:
        """Whether the open record has numbers."""
        return any(not isinstance(value, Media) for value in self._open.values())

    def summary(self, *, rank: int = 0, counts: bool = True) -> list[float]:
        """Return what ranks exchange about the open record: marks of its names, and the first `_EXCHANGED` numbers.

        The squares of the marks are part of it, so that the sums over all ranks show whether all marks are equal. So is the
        rank, if it has numbers, and that it has some: if only one rank has numbers, the sums say which one.

        Args:
            rank: The index of this rank.
            counts: Whether the numbers of this rank are part of the sums.
        """
        numbers = self._numbers()
        texts = [f"{name}\1{value.kind}\1{'device' * value.on_device}" for name, value in numbers.items()]
        mark = 1 + zlib.crc32("\0".join(texts).encode()) if numbers else 0
        low, high = mark & 0xFFFF, mark >> 16
        here = [value for value in numbers.values() if not value.on_device]
        values = [float(term) for value in here for term in value.terms(first=rank == 0)][:_EXCHANGED] if counts else []
        some = [1, rank] if numbers else [0, 0]
        return [low, low * low, high, high * high, *some, *values, *[0.0] * (_EXCHANGED - len(values))]

    def reduce(self, driver: Ranks, sums: Sequence[float]) -> None:
        """Reduce each number of the open record over the ranks that logged it, by default to its mean.

        Equal numbers have an unchanged mean. Numbers on a device stay there if all ranks logged the same names. Every rank
        must call this.

        Args:
            driver: Reduces over the ranks.
            sums: The sums of `summary` over all ranks.
        """
        ranks, counted, numbers, first = driver.world_size, driver.data_world_size, self._numbers(), driver.rank == 0
        *marks, holders, holder = (int(total) for total in sums[:6])
        if not holders:
            return
        if holders == 1 < ranks:  # such as the main process: what it has does not grow with the ranks
            only = driver.broadcast({name: value.on_host() for name, value in numbers.items()}, holder)
            self._reduce_gathered([only], 1)
            return
        if any(squares * ranks != total * total for total, squares in zip(marks[::2], marks[1::2], strict=True)):
            everyone = driver.gather({name: value.on_host() for name, value in numbers.items()})
            self._reduce_gathered(everyone, driver.tensor_parallel)
            return
        here = {name: value for name, value in numbers.items() if not value.on_device}
        terms = [float(term) for value in here.values() for term in value.terms(first=first)]
        more = torch.tensor(terms[_EXCHANGED:], dtype=torch.float64)
        self._put(here, iter([*sums[6:], *(driver.reduce(more, "sum").tolist() if len(more) else [])]), counted)
        away = {name: value for name, value in numbers.items() if name not in here}
        if apart := [term for value in away.values() for term in value.terms(first=first)]:
            tensors = [widened(term) for term in apart if isinstance(term, Tensor)] or [torch.zeros((), device=driver.device)]
            like = max(tensors, key=lambda term: term.itemsize)
            self._put(away, iter(driver.reduce(as_numbers(like, apart), "sum").unbind()), counted)
        for side in (here, away):
            if chosen := [value for value in side.values() if value.how in EXTREMES]:
                put_extremes(chosen, driver.reduce(extremes(chosen), "max"))

    def set_aside(self, at: Counters) -> None:
        """Keep the open record for `reduce_aside`, and open another one."""
        self._aside = at, self._open, self._plain
        self._open, self._plain, self.idle = {}, True, False

    def reduce_aside(self, driver: Ranks, sums: Sequence[float], at: Counters) -> None:
        """Reduce the record that was set aside, as `reduce` does, and close it. Every rank must call this.

        Args:
            driver: Reduces over the ranks.
            sums: The sums of the `summary` of that record over all ranks.
            at: The counters of the record. A rank that logged nothing there has set none aside.
        """
        with self._taking_up(at):
            self.reduce(driver, sums)

    @contextmanager
    def _taking_up(self, at: Counters) -> Iterator[None]:
        """Open the record that was set aside, for a block, and close it at these counters."""
        later = self._open, self._plain
        (_, self._open, self._plain), self._aside = self._aside or (at, {}, True), None
        yield
        self._close(at)
        self._open, self._plain = later
        self.idle = not self._open and not self._closed

    def _put(self, numbers: Mapping[str, Reduced], sums: Iterator[Any], ranks: int) -> None:
        """Replace numbers by what follows from the sums of their terms over all ranks."""
        for name, number in numbers.items():
            number.put(sums, ranks)
            self._open[name] = number.total if number.how is None else number

    def _reduce_gathered(self, everyone: Sequence[Mapping[str, Reduced]], together: int) -> None:
        """Reduce the numbers of all ranks, which logged different names or in different ways.

        Of the ranks that compute `together`, which follow one another, the first counts, if one of these has the name.
        """
        for name in dict.fromkeys(name for rank_value in everyone for name in rank_value):
            values = [rank[name] for ranks in (everyone[::together], everyone) for rank in ranks if name in rank]
            values = values[: sum(name in rank_value for rank_value in everyone[::together])] or values
            values = [value for value in values if not isinstance(value, IntervalSums)] or values
            ways = list(dict.fromkeys(value.how for value in values))
            if len(ways) > 1:
                raise mixed(name, *ways[:2])
            number = values[0].with_others(values[1:])
            self._open[name] = number.total if number.how is None else number
            self._plain &= number.how is None
        self.idle = False

    def _numbers(self) -> dict[str, Reduced]:
        """Return the numbers of the open record, also those without a reduction."""
        numbers = {name: value for name, value in self._open.items() if not isinstance(value, Media)}
        return {name: number if isinstance(number, Reduced) else Reduced(None, number) for name, number in numbers.items()}

    def take_numbers(self) -> dict[str, float | Tensor | tuple[str, Any, Any]]:
        """Remove the numbers from the open record, and return them as plain values, for `put_numbers`."""
        numbers = self._numbers()
        self._open = {name: value for name, value in self._open.items() if name not in numbers}
        return {
            name: number.total if number.how is None else (number.kind, number.total, number.weight)
            for name, number in numbers.items()
        }

    def put_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers that `take_numbers` returned."""
        for name, value in numbers.items():
            if isinstance(value, tuple | list) and value[0] == "interval":
                self.add_mean(name, *value[1:])
            elif isinstance(value, tuple | list):
                self._ways[name], self._open[name] = value[0], Reduced(*value)
                self._plain, self.idle = False, False
            else:
                self.add(name, value)

    def drop(self) -> None:
        """Drop the open record."""
        self._open, self._plain = {}, True
        self.idle = not self._closed

    def take(self, at: Counters | None, *, wait: bool) -> list[Record]:
        """Close the open record at these counters (None: leave it open), and return closed records with all their numbers.

        With `wait`, wait for all numbers.
        """
        if wait and self._aside is not None:  # after an error: the other ranks complete it no more
            with self._taking_up(self._aside[0]):
                pass
        if at is not None:
            self._close(at)
        taken: list[Record] = []
        while self._closed and (wait or isinstance(self._closed[0], Record) or self._closed[0].arrived()):
            first = self._closed.popleft()
            taken.append(first if isinstance(first, Record) else first.record())
        self.idle = not self._open and not self._closed and self._aside is None
        return taken

    def _close(self, at: Counters) -> None:
        """Close the open record at these counters, if it holds anything."""
        if self._open:
            content = self._open if self._plain else {name: _final(value) for name, value in self._open.items()}
            arrived = self._plain or not any(isinstance(value, Tensor | Media) for value in content.values())
            kind = Record if arrived else _OnTheWay
            self._closed.append(kind(at, time.time(), cast("dict[str, float]", content)))
            self._open, self._plain = {}, True


class _OnTheWay:
    """A closed record with tensors that may not be on the host yet."""

    def __init__(self, at: Counters, when: float, content: Mapping[str, Loggable]) -> None:
        self.at, self.when, self.content = at, when, content
        self.names = [name for name, value in content.items() if isinstance(value, Tensor)]
        self.numbers = ArrivingNumbers([cast("Tensor", content[name]) for name in self.names])

    def arrived(self) -> bool:
        return self.numbers.arrived

    def record(self) -> Record:
        moved = dict(zip(self.names, self.numbers, strict=True))
        values = {name: moved.get(name, value) for name, value in self.content.items() if not isinstance(value, Media)}
        media = {name: value for name, value in self.content.items() if isinstance(value, Media)}
        return Record(self.at, self.when, values, media)


def _final(value: Any) -> Any:
    return value.value if isinstance(value, Reduced) else value


def _wrong_name(name: object) -> Exception:
    if isinstance(name, str):
        return ValueError(f"{name!r} is the name of a counter, which every record holds. Log the value as 'train/{name}'.")
    return TypeError(f"run.log takes a name, such as 'train/lr', and a value, or a dict of them; got the name {name!r}")


def _loggable(name: str, value: object) -> Loggable:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            # A copy: a view of a weight changes with the next update.
            return value.item() if value.is_cpu else value.detach().clone()
        raise TypeError(
            f"run.log({name!r}, ...) takes a number, a tensor of shape () or Image, Audio, Figure, Histogram, Text; got a "
            f"tensor of shape {tuple(value.shape)}. Reduce it, or log Histogram(tensor) or Image(tensor)."
        )
    if isinstance(value, int | float | Media):
        return value
    number = getattr(value, "item", lambda: None)()  # numpy's scalars
    if isinstance(number, int | float):
        return number
    raise TypeError(
        f"run.log({name!r}, ...) takes a number, a tensor of shape () or Image, Audio, Figure, Histogram, Text; got "
        f"{type(value).__name__} {value!r}"
    )
