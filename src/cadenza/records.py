"""What a run logs: values of one step, gathered into one record; and the history of all records."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.errors import MissingExtraError, nearest
from cadenza.progress import Counters

if TYPE_CHECKING:
    import pandas


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

    @property
    def step(self) -> int:
        """The step it belongs to."""
        return self.at.step

    def to_json(self) -> str:
        """Return one line of JSON: counters, time, values.

        A number that is not finite is written as ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, as protobuf's JSON does:
        JSON itself has no word for it.
        """
        counters = {"epoch": self.at.epoch, "step": self.at.step, "batch": self.at.batch, "samples": self.at.samples}
        values = {name: _in_json(value) for name, value in self.values.items()}
        return json.dumps({**counters, "time": round(self.time, 3), **values})


class Book:
    """Gathers what is logged, and hands it out as records once the numbers have left the device."""

    def __init__(self) -> None:
        self._open: dict[str, Loggable] = {}
        self._closed: deque[_Closed] = deque()
        self.idle = True
        """Whether nothing waits to be handed out."""

    def add(self, name: str, value: object) -> None:
        """Note a value for the record under way; a later one of the same name replaces it.

        Raises:
            TypeError: `value` is no number, no tensor of shape () and no media.
            ValueError: The name is that of a counter, which every record has.
        """
        if name in RESERVED and not isinstance(value, Media):
            raise ValueError(f"{name!r} is what every record says of itself; log the value as 'train/{name}', for example")
        self._open[name] = _loggable(name, value)
        self.idle = False

    def close(self, at: Counters) -> None:
        """End the record under way, if anything is in it, and start the way of its tensors to the host."""
        if self._open:
            self._closed.append(_Closed(at, time.time(), self._open))
            self._open = {}

    def ready(self, *, wait: bool) -> Iterator[Record]:
        """Yield closed records in order, as far as their numbers are here; all of them with `wait`."""
        while self._closed and (wait or self._closed[0].arrived()):
            yield self._closed.popleft().record()
        self.idle = not self._open and not self._closed


LIMIT = 50_000


class History:
    """Every record's numbers, in memory; of a name with very many, one in so many.

    A name keeps at most `limit` values. When that is reached, every second one is dropped, and from then on every second
    one is kept; later every fourth, and so on. The first and the newest are always there. ``metrics.jsonl`` has them all.

    Args:
        limit: How many values of a name are kept, at least 4: about 130 bytes each in memory, and 16 in a checkpoint. It may
            be set later, in ``on_setup`` for example: ``run.history.limit = 200_000``.

    >>> history = History()
    >>> history.add(Record(Counters(step=5), 0.0, {"train/loss": 0.5}))
    >>> history["train/loss"], history.latest, history.names
    ([(5, 0.5)], {'train/loss': 0.5}, ['train/loss'])
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 4:
            raise ValueError(f"limit must be at least 4 values of a name; got {limit!r}")
        self.limit = limit
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._given: dict[str, int] = {}
        self._every: dict[str, int] = {}

    def add(self, record: Record) -> str | None:
        """Keep a record's numbers; return, once, a sentence that says so when not all are kept any more."""
        told = None
        for name, value in record.values.items():
            series = self._series.setdefault(name, [])
            given, every = self._given.get(name, 0), self._every.get(name, 1)
            if series and (given - 1) % every:
                series.pop()  # it was there as the newest only
            series.append((record.step, value))
            self._given[name] = given + 1
            if len(series) >= self.limit:
                first = not self._every
                self._thin(name)
                told = self._word_on(name) if first else told
        return told

    def _thin(self, name: str) -> None:
        series = self._series[name]
        self._every[name] = self._every.get(name, 1) * 2
        # The newest stays: if it is not in line with the others, only until the next one comes.
        series[:] = series[::2] if len(series) % 2 else [*series[::2], series[-1]]

    def _word_on(self, name: str) -> str:
        return (
            f"{name!r} has {self._given[name]} values: run.history keeps one in {self._every[name]} of them from here on, and "
            "likewise of other names when they have as many; metrics.jsonl has all"
        )

    @property
    def thinned(self) -> dict[str, int]:
        """By name, of how many values one is kept, where not all are."""
        return dict(self._every)

    def __getitem__(self, name: str) -> list[tuple[int, float]]:
        """Return all (step, value) of a name that are kept.

        Raises:
            KeyError: Nothing was logged under this name; the nearest one is shown.
        """
        if name not in self._series:
            raise KeyError(f"nothing was logged as {name!r}.{nearest(name, self._series)} There is: {self.names}")
        return self._series[name]

    def __contains__(self, name: object) -> bool:
        return name in self._series

    @property
    def names(self) -> list[str]:
        """Every name that was logged, in the order of first appearance."""
        return list(self._series)

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each name."""
        return {name: series[-1][1] for name, series in self._series.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return for each name steps (N,) int64, values (N,) float64, how many came, and one in how many is kept."""
        return {
            name: (
                torch.tensor([step for step, _ in series]),
                torch.tensor([value for _, value in series], dtype=torch.float64),
                self._given[name],
                self._every.get(name, 1),
            )
            for name, series in self._series.items()
        }

    @staticmethod
    def from_state(state: Mapping[str, Any], limit: int = LIMIT) -> History:
        """Return the history that `state_dict` was made of."""
        history = History(limit)
        for name, (steps, values, given, every) in state.items():
            history._series[name] = list(zip(steps.tolist(), values.tolist(), strict=True))
            history._given[name] = given
            history._every |= {name: every} if every > 1 else {}
        return history

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame: a row for each step in which something was logged, a column for each name."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", needed_by="History.to_frame()", extra="data") from None
        columns = {name: pandas.Series(dict(series)) for name, series in self._series.items()}
        return pandas.DataFrame(columns).rename_axis("step").sort_index()


class _Closed:
    """A record whose tensors may still be on their way to the host: all of one device travel together."""

    def __init__(self, at: Counters, when: float, content: Mapping[str, Loggable]) -> None:
        self.at, self.when, self.content = at, when, content
        on_device = {name: value for name, value in content.items() if isinstance(value, Tensor) and not value.is_cpu}
        self.names = list(on_device)
        self.event: torch.cuda.Event | None = None
        if on_device:
            together = torch.stack([value.float() for value in on_device.values()])
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


def _loggable(name: str, value: object) -> Loggable:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value.detach().clone()  # as it is now: a view of a weight changes with the next update
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


def _in_json(value: float) -> float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _copied(tensor: Tensor) -> Tensor:
    """Return what the tensor holds now: it may be changed before a sink gets to it."""
    return tensor.detach().to("cpu", copy=True)
