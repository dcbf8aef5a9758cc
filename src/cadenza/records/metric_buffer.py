"""The metric buffer: logged values that are not in a record yet, and records with numbers that are still on the device."""

from __future__ import annotations

import math
import sys
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from cadenza.records.record import RESERVED, Loggable, Media, Record
from cadenza.records.scalars import widened
from cadenza.status.progress import Counters

_EXCHANGED = 24  # numbers of a record that ranks exchange together with their requests


class Ranks(Protocol):
    """The part of a driver that reduces numbers over ranks."""

    world_size: int

    def gather(self, value: Any) -> list[Any]: ...
    def reduce(self, value: Tensor, how: Literal["mean", "sum"] = "mean") -> Tensor: ...


class MetricBuffer:
    """Collects logged values, and returns them as records once their numbers have left the device."""

    def __init__(self) -> None:
        self._open: dict[str, Loggable] = {}
        self._plain = True
        self._closed: deque[_OnTheWay | Record] = deque()
        self.idle: bool = True
        """Whether it holds neither values nor records."""

    def add(self, name: str, value: object) -> None:
        """Add a value to the open record; a later one of the same name replaces it. Raises TypeError or ValueError."""
        if not isinstance(name, str):
            raise TypeError(f"run.log takes a name, such as 'train/lr', and a value, or a dict of them; got the name {name!r}")
        if name in RESERVED and not isinstance(value, Media):
            raise ValueError(f"{name!r} is the name of a counter, which every record holds. Log the value as 'train/{name}'.")
        if type(value) is not float:
            value = _loggable(name, value)
            self._plain &= not isinstance(value, Tensor | Media)
        self._open[name] = value
        self.idle = False

    @property
    def holds_numbers(self) -> bool:
        """Whether the open record has numbers."""
        return bool(self._numbers())

    def summary(self) -> list[float]:
        """Return what ranks exchange about the open record: marks of its names, and the first `_EXCHANGED` numbers.

        The squares of the marks are part of it, so that the sums over all ranks show whether all marks are equal.
        """
        numbers = self._numbers()
        mark = 1 + zlib.crc32("\0".join(numbers).encode()) if numbers else 0
        low, high = mark & 0xFFFF, mark >> 16
        values = [float(value) for value in numbers.values() if not _on_device(value)][:_EXCHANGED]
        return [low, low * low, high, high * high, *values, *[0.0] * (_EXCHANGED - len(values))]

    def reduce(self, driver: Ranks, sums: Sequence[float]) -> None:
        """Replace each number of the open record by its mean over the ranks that logged it. Equal numbers do not change.

        Numbers on a device stay there if all ranks logged the same names. Every rank must call this.

        Args:
            driver: Reduces over the ranks.
            sums: The sums of `summary` over all ranks.
        """
        ranks, numbers = driver.world_size, self._numbers()
        marks = [int(total) for total in sums[:4]]
        if not any(marks):
            return
        if any(squares * ranks != total * total for total, squares in zip(marks[::2], marks[1::2], strict=True)):
            everyone = driver.gather({name: float(value) for name, value in numbers.items()})
            for name in dict.fromkeys(name for one in everyone for name in one):
                values = [one[name] for one in everyone if name in one]
                self._open[name] = values[0] if values.count(values[0]) == len(values) else sum(values) / len(values)
            self.idle = False
            return
        here = {name: value for name, value in numbers.items() if not _on_device(value)}
        more = torch.tensor([float(value) for value in [*here.values()][_EXCHANGED:]], dtype=torch.float64)
        totals = [*sums[4:], *(driver.reduce(more, "sum").tolist() if len(more) else [])]
        for (name, own), total in zip(here.items(), totals, strict=False):
            if not math.isclose(total / ranks, own, rel_tol=ranks * sys.float_info.epsilon):  # else it was rounded
                self._open[name] = total / ranks
        away = {name: value for name, value in numbers.items() if name not in here}
        if away:
            means = driver.reduce(torch.stack([widened(torch.as_tensor(value)) for value in away.values()]))
            self._open |= dict(zip(away, means, strict=True))

    def _numbers(self) -> dict[str, float | Tensor]:
        return {name: value for name, value in self._open.items() if not isinstance(value, Media)}

    def take_numbers(self) -> dict[str, float | Tensor]:
        """Remove the numbers from the open record, and return them."""
        numbers = self._numbers()
        self._open = {name: value for name, value in self._open.items() if name not in numbers}
        return numbers

    def drop(self) -> None:
        """Drop the open record."""
        self._open, self._plain = {}, True
        self.idle = not self._closed

    def take(self, at: Counters | None, *, wait: bool) -> list[Record]:
        """Close the open record at these counters (None: leave it open), and return closed records with all their numbers.

        With `wait`, wait for all numbers.
        """
        if self._open and at is not None:
            kind = Record if self._plain else _OnTheWay
            self._closed.append(kind(at, time.time(), cast("dict[str, float]", self._open)))
            self._open, self._plain = {}, True
        taken: list[Record] = []
        while self._closed and (wait or isinstance(self._closed[0], Record) or self._closed[0].arrived()):
            first = self._closed.popleft()
            taken.append(first if isinstance(first, Record) else first.record())
        self.idle = not self._open and not self._closed
        return taken


class _OnTheWay:
    """A closed record with tensors that may not be on the host yet. All tensors of a device are copied together."""

    def __init__(self, at: Counters, when: float, content: Mapping[str, Loggable]) -> None:
        self.at, self.when, self.content = at, when, content
        on_device = {name: value for name, value in content.items() if isinstance(value, Tensor) and not value.is_cpu}
        self.names = list(on_device)
        self.event: torch.cuda.Event | None = None
        if on_device:
            together = torch.stack([widened(value) for value in on_device.values()])
            self.numbers = together.to("cpu", non_blocking=together.is_cuda)
            if together.is_cuda:
                self.event = torch.cuda.Event()
                self.event.record()

    def arrived(self) -> bool:
        return self.event is None or self.event.query()

    def record(self) -> Record:
        if self.event is not None:
            self.event.synchronize()
        moved = dict(zip(self.names, self.numbers.tolist(), strict=True)) if self.names else {}
        values = {
            name: moved[name] if name in moved else value.item() if isinstance(value, Tensor) else value
            for name, value in self.content.items()
            if not isinstance(value, Media)
        }
        media = {name: value for name, value in self.content.items() if isinstance(value, Media)}
        return Record(self.at, self.when, values, media)


def _on_device(value: float | Tensor) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


def _loggable(name: str, value: object) -> Loggable:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            # A copy: a view of a weight changes with the next update.
            return value.item() if value.is_cpu else value.detach().clone()
        raise TypeError(
            f"run.log({name!r}, ...) takes a number, a tensor of shape () or Image, Audio, Figure, Histogram, Text; got a "
            f"tensor of shape {tuple(value.shape)}. Reduce it, or log Histogram(tensor)."
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
