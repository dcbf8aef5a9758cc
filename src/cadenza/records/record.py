"""What a run logs: values of one step, gathered into one record; and the history of all records."""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from cadenza.records.scalars import widened
from cadenza.status.progress import Counters


class Media:
    """The base of logged values that are no numbers."""


@dataclass(frozen=True, slots=True)
class Image(Media):
    """A picture: shape (C, H, W), C is 1, 3 or 4; float in 0..1 or uint8."""

    pixels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.shape[0] not in (1, 3, 4):
            raise ValueError(f"an Image has shape (C, H, W) with C of 1, 3 or 4; got {tuple(self.pixels.shape)}")
        object.__setattr__(self, "pixels", _copied(self.pixels))


@dataclass(frozen=True, slots=True)
class Audio(Media):
    """A sound: shape (T,), float in -1..1, with `rate` samples a second."""

    samples: Tensor
    rate: int

    def __post_init__(self) -> None:
        if self.samples.ndim != 1:
            raise ValueError(f"an Audio has shape (T,); got {tuple(self.samples.shape)}")
        object.__setattr__(self, "samples", _copied(self.samples))


@dataclass(frozen=True, slots=True)
class Histogram(Media):
    """The distribution of a tensor's values, any shape."""

    values: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _copied(self.values))


@dataclass(frozen=True, slots=True)
class Figure(Media):
    """A matplotlib figure."""

    figure: Any

    def __post_init__(self) -> None:
        if not hasattr(self.figure, "savefig"):
            raise TypeError(f"a Figure holds a matplotlib figure, such as plt.figure(); got {self.figure!r}")

    def drawn(self) -> Image:
        """Return the picture that it shows now, shape (3, H, W), uint8; the figure stays as it is."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = self.figure.canvas  # drawing puts another in its place, and a window of the user's would go dead
        try:
            fresh: Any = FigureCanvasAgg(self.figure)
            fresh.draw()
            pixels = fresh.buffer_rgba()
            return Image(torch.frombuffer(pixels, dtype=torch.uint8).view(pixels.shape)[..., :3].permute(2, 0, 1))
        finally:
            self.figure.set_canvas(canvas)


@dataclass(frozen=True, slots=True)
class Text(Media):
    """Words; sinks that know Markdown show it."""

    text: str


_TOLD = 24  # numbers of a record that travel with what the ranks tell each other anyway
_JSON = json.JSONEncoder(allow_nan=False).encode
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
Loggable = float | int | Tensor | Media
RESERVED = ("epoch", "step", "batch", "samples", "time")
"""What a record says of itself; no number can have these names."""


@dataclass(frozen=True, slots=True)
class Record:
    """All that was logged in one step: plain numbers by name, the counters, and when (seconds since 1970)."""

    at: Counters
    time: float
    values: Mapping[str, float]
    media: Mapping[str, Media] = field(default_factory=dict)
    _line: str = field(default="", init=False, repr=False, compare=False)

    @property
    def step(self) -> int:
        """The step it belongs to."""
        return self.at.step

    def to_json(self) -> str:
        """Return one line of JSON: counters, time, values.

        A number that is not finite is written as ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, as protobuf's JSON does:
        JSON itself has no word for it.
        """
        if self._line:  # several write it
            return self._line
        at = self.at
        counters = f'"epoch": {at.epoch}, "step": {at.step}, "batch": {at.batch}, "samples": {at.samples}'
        try:
            values = _JSON(self.values)
        except ValueError:
            values = _JSON({name: value if math.isfinite(value) else _WORDS[str(value)] for name, value in self.values.items()})
        line = f'{{{counters}, "time": {round(self.time, 3)}{", " * bool(self.values)}{values[1:]}'
        object.__setattr__(self, "_line", line)
        return line


class Ranks(Protocol):
    """The part of a driver that reduces numbers over ranks."""

    world_size: int

    def gather(self, value: Any) -> list[Any]: ...
    def reduce(self, value: Tensor, how: Literal["mean", "sum"] = "mean") -> Tensor: ...


class Book:
    """Gathers what is logged, and hands it out as records once the numbers have left the device."""

    def __init__(self) -> None:
        self._open: dict[str, Loggable] = {}
        self._plain = True
        self._closed: deque[_Closed | Record] = deque()
        self.idle = True
        """Whether nothing waits to be handed out."""

    def add(self, name: str, value: object) -> None:
        """Note a value for the record under way; a later one of the same name replaces it.

        Raises:
            TypeError: `value` is no number, no tensor of shape () and no media; or `name` is no string.
            ValueError: The name is that of a counter, which every record has.
        """
        if not isinstance(name, str):
            raise TypeError(f"run.log takes a name, such as 'train/lr', and a value, or a dict of them; got the name {name!r}")
        if name in RESERVED and not isinstance(value, Media):
            raise ValueError(f"{name!r} is what every record says of itself; log the value as 'train/{name}', for example")
        if type(value) is not float:
            value = _loggable(name, value)
            self._plain &= not isinstance(value, Tensor | Media)
        self._open[name] = value
        self.idle = False

    @property
    def holds_numbers(self) -> bool:
        """Whether there are numbers in the record under way."""
        return bool(self._numbers())

    def told(self) -> list[float]:
        """Return what the other ranks must know of the record under way: marks of its names, and the first numbers.

        Of each mark its square as well, so that the sums over all ranks show whether the marks are all the same.
        """
        numbers = self._numbers()
        mark = 1 + zlib.crc32("\0".join(numbers).encode()) if numbers else 0
        low, high = mark & 0xFFFF, mark >> 16
        values = [float(value) for value in numbers.values() if not _on_device(value)][:_TOLD]
        return [low, low * low, high, high * high, *values, *[0.0] * (_TOLD - len(values))]

    def reduce(self, driver: Ranks, sums: Sequence[float]) -> None:
        """Make each number of the record under way the mean over the ranks that logged it; equal ones stay as they are.

        What is on a device stays there if all ranks logged the same names. Every rank must call this.

        Args:
            driver: Over whose ranks.
            sums: What `told` returned, summed over all ranks.
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
        more = torch.tensor([float(value) for value in [*here.values()][_TOLD:]], dtype=torch.float64)
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
        """Take the numbers out of the record under way."""
        numbers = self._numbers()
        self._open = {name: value for name, value in self._open.items() if name not in numbers}
        return numbers

    def drop(self) -> None:
        """Forget the record under way."""
        self._open, self._plain = {}, True
        self.idle = not self._closed

    def close(self, at: Counters) -> None:
        """End the record under way, if anything is in it, and start the way of its tensors to the host."""
        if self._open:
            if self._plain:
                self._closed.append(Record(at, time.time(), cast("dict[str, float]", self._open)))
            else:
                self._closed.append(_Closed(at, time.time(), self._open))
            self._open, self._plain = {}, True

    def ready(self, *, wait: bool) -> list[Record]:
        """Return closed records in order, as far as their numbers are here; all of them with `wait`."""
        here: list[Record] = []
        while self._closed:
            first = self._closed[0]
            if isinstance(first, _Closed):
                if not (wait or first.arrived()):
                    break
                first = first.record()
            self._closed.popleft()
            here.append(first)
        self.idle = not self._open and not self._closed
        return here


class _Closed:
    """A record whose tensors may still be on their way to the host: all of one device travel together."""

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
            # As it is now: a view of a weight changes with the next update.
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


def _copied(tensor: Tensor) -> Tensor:
    """Return what the tensor holds now: it may be changed before a sink gets to it."""
    return tensor.detach().to("cpu", copy=True)
