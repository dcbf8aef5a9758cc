"""Records: the values that a run logs at one step, and media among them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from cadenza.status.progress import Counters
from cadenza.status.reprs import brief

if TYPE_CHECKING:  # who only reads records needs no torch
    from torch import Tensor


class Media:
    """The base class of logged values that are not numbers."""


@dataclass(frozen=True, slots=True)
class Image(Media):
    """A picture: shape (C, H, W), C is 1, 3 or 4; float in 0..1 or uint8.

    >>> import torch
    >>> Image(torch.zeros(3, 8, 8)).pixels.shape
    torch.Size([3, 8, 8])
    """

    pixels: Tensor
    """A copy on the host."""

    def __repr__(self) -> str:
        return f"Image({brief(self.pixels)})"

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.shape[0] not in (1, 3, 4):
            turn = ". Write pixels.permute(2, 0, 1)" if self.pixels.ndim == 3 and self.pixels.shape[2] in (1, 3, 4) else ""
            raise ValueError(f"an Image has shape (C, H, W) with C of 1, 3 or 4; got {tuple(self.pixels.shape)}{turn}")
        object.__setattr__(self, "pixels", _copied(self.pixels))


@dataclass(frozen=True, slots=True)
class Audio(Media):
    """A sound: shape (T,), float in -1..1, with `rate` samples a second.

    >>> import torch
    >>> Audio(torch.zeros(16000), rate=16000).rate
    16000
    """

    samples: Tensor
    """A copy on the host."""
    rate: int
    """Samples a second."""

    def __repr__(self) -> str:
        return f"Audio({brief(self.samples)}, rate={self.rate})"

    def __post_init__(self) -> None:
        if self.samples.ndim != 1:
            raise ValueError(f"an Audio has shape (T,); got {tuple(self.samples.shape)}")
        object.__setattr__(self, "samples", _copied(self.samples))


@dataclass(frozen=True, slots=True)
class Histogram(Media):
    """The distribution of a tensor's values, any shape.

    >>> import torch
    >>> Histogram(torch.randn(2, 100)).values.shape
    torch.Size([2, 100])
    """

    values: Tensor
    """A copy on the host."""

    def __repr__(self) -> str:
        return f"Histogram({brief(self.values)})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _copied(self.values))


@dataclass(frozen=True, slots=True)
class Figure(Media):
    """A matplotlib figure."""

    figure: Any
    """A ``matplotlib.figure.Figure``."""

    def __post_init__(self) -> None:
        if not hasattr(self.figure, "savefig"):
            raise TypeError(f"a Figure holds a matplotlib figure, such as plt.figure(); got {self.figure!r}")

    def drawn(self) -> Image:
        """Return the picture that the figure shows now, shape (3, H, W), uint8. The figure does not change."""
        import torch
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = self.figure.canvas  # drawing replaces the canvas, and a window of the user would stop
        try:
            fresh: Any = FigureCanvasAgg(self.figure)
            fresh.draw()
            pixels = fresh.buffer_rgba()
            return Image(torch.frombuffer(pixels, dtype=torch.uint8).view(pixels.shape)[..., :3].permute(2, 0, 1))
        finally:
            self.figure.set_canvas(canvas)


@dataclass(frozen=True, slots=True)
class Text(Media):
    """Text; sinks that support Markdown render it.

    >>> Text("**done**")
    Text(text='**done**')
    """

    text: str
    """The text."""


_FLOATS = {float}
_TEXTS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
Loggable: TypeAlias = "float | int | Tensor | Media"
RESERVED = frozenset(("epoch", "step", "batch", "samples", "tokens", "time"))
"""The counters and the time of a record; no number can have these names."""


@dataclass(frozen=True, slots=True)
class Record:
    """The values logged at one step: numbers by name, the counters, and the time (seconds since 1970)."""

    at: Counters
    """The counters at the end of the step."""
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """The numbers, by name."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """Images, audio, figures, histograms and texts, by name."""
    _line: str = field(default="", init=False, repr=False, compare=False)

    @property
    def step(self) -> int:
        """The step it belongs to."""
        return self.at.step

    def to_json(self) -> str:
        """Return one line of JSON. Numbers that are not finite become text, ``"NaN"`` or ``"-Infinity"``, as in protobuf."""
        if self._line:  # several sinks write it
            return self._line
        at = self.at
        counters = f'"epoch": {at.epoch}, "step": {at.step}, "batch": {at.batch}, "samples": {at.samples}'
        counters += f', "tokens": {at.tokens}' if at.tokens else ""
        line = f'{{{counters}, "time": {round(self.time, 3)}{_json_of(self.values)}}}'
        object.__setattr__(self, "_line", line)
        return line


def drawn(record: Record) -> Record:
    """Return a record with its figures drawn, in the thread that made them and before they change."""
    media = {name: medium.drawn() if isinstance(medium, Figure) else medium for name, medium in record.media.items()}
    return replace(record, media=media)


def _json_of(values: Mapping[str, float]) -> str:
    """Return numbers as members of a JSON object after others. Most are finite floats: `json` takes four times as long."""
    if set(map(type, values.values())) == _FLOATS and math.isfinite(sum(values.values())):
        return _form(tuple(values)) % tuple(values.values())
    written = {name: value if math.isfinite(value) else _TEXTS[str(value)] for name, value in values.items()}
    return ", " * bool(written) + json.dumps(written)[1:-1]


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """Return the members of an object with these names, as a format of their values."""
    return "".join(f", {json.dumps(name).replace('%', '%%')}: %r" for name in names)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy: the tensor may change before a sink reads it."""
    return tensor.detach().to("cpu", copy=True)
