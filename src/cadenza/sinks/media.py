"""Media in the formats of trackers: pillow images, 16-bit samples, histogram counts."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from cadenza.records.record import Audio, Histogram, Image, Media, Record

if TYPE_CHECKING:
    import numpy
    import PIL.Image

EMPTY = "has no values to show"


class MediaBox:
    """Converts the media of records for a tracker. Media that the tracker cannot show are left out, with one remark per name.

    Args:
        remark: A function that takes a remark for the user.
    """

    def __init__(self, remark: Callable[[str], object]) -> None:
        self._remark = remark
        self._left_out: set[str] = set()

    def of(self, record: Record, translate: Callable[[Media], Any]) -> dict[str, Any]:
        """Return the converted media of a record, by name.

        Args:
            record: The record.
            translate: Returns the object of the tracker for a medium, or a text with the reason that there is none.
        """
        shown = {name: _no_pillow(medium) or translate(medium) for name, medium in record.media.items()}
        for name, theirs in shown.items():
            if isinstance(theirs, str) and name not in self._left_out:
                self._left_out.add(name)
                self._remark(f"{name!r} of step {record.step} {theirs}, and is left out")
        return {name: theirs for name, theirs in shown.items() if not isinstance(theirs, str)}


def picture_of(image: Image) -> PIL.Image.Image:
    """Return a pillow image."""
    import PIL.Image

    pixels = image.pixels
    if pixels.dtype != torch.uint8:
        pixels = (torch.nan_to_num(pixels.float()) * 255).clamp(0, 255).to(torch.uint8)
    one_colour = len(pixels) == 1
    return PIL.Image.fromarray((pixels[0] if one_colour else pixels.permute(1, 2, 0)).contiguous().numpy())


def samples_of(audio: Audio) -> numpy.ndarray[Any, Any]:
    """Return the samples, shape (T,), int16."""
    loudest = torch.iinfo(torch.int16).max
    return (torch.nan_to_num(audio.samples.float()).clamp(-1, 1) * loudest).to(torch.int16).numpy()


def wave_of(audio: Audio) -> bytes:
    """Return a WAV file."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(audio.rate)
        file.writeframes(samples_of(audio).astype("<i2").tobytes())
    return written.getvalue()


def counts_of(histogram: Histogram, bins: int = 64) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]] | None:
    """Return the counts and the edges of the bins; None if no value is finite."""
    import numpy

    values = histogram.values.double()
    finite = values[values.isfinite()]
    return numpy.histogram(finite.numpy(), bins=bins) if len(finite) else None


def _no_pillow(medium: Media) -> str | None:
    missing = isinstance(medium, Image) and find_spec("PIL") is None
    return "needs the package 'pillow' (pip install 'cadenza[figures]')" if missing else None
