"""Media of records: in the formats of trackers, and as files in the run directory, which the report shows."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cadenza.records.branch_files import MEDIA, path_of
from cadenza.records.record import Audio, Histogram, Image, Media, Record, Text, drawn
from cadenza.records.writer import Channel, Writer
from cadenza.status.formats import counted

if TYPE_CHECKING:
    import numpy
    import PIL.Image

EMPTY = "has no values to show"
FILES, BYTES = 2_000, 200_000_000
"""What a directory keeps at most; later media are left out."""


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


def counts_of(histogram: Histogram) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]] | None:
    """Return the counts and the edges of the bins; None if no value is finite."""
    import numpy

    values = histogram.values.double()
    finite = values[values.isfinite()]
    return numpy.histogram(finite.numpy(), bins=64) if len(finite) else None


def _no_pillow(medium: Media) -> str | None:
    missing = isinstance(medium, Image) and find_spec("PIL") is None
    return "needs the package 'pillow' (pip install 'cadenza[figures]')" if missing else None


class MediaFiles:
    """Writes media as PNG, WAV, JSON (the counts of a histogram) and text, in a writer thread.

    A continued run replaces the files of the steps that it repeats.

    Args:
        directory: The run's directory.
        writer: The channels of the run.
    """

    def __init__(self, directory: Path, writer: Writer) -> None:
        self.folder: Path = directory / MEDIA
        self.remarks: list[str] = []
        """Each medium that was left out, with the reason."""
        self._box = MediaBox(self.remarks.append)
        earlier = [path.stat().st_size for path in self.folder.glob("*/*") if path.is_file()]
        self._files, self._bytes = len(earlier), sum(earlier)
        self._first_missed = 0
        self._channel: Channel = Channel(writer, self._write)

    def put(self, record: Record) -> None:
        """Queue the media of a record. Figures are drawn now, before they change.

        Raises:
            Exception: The error of an earlier record in the thread; once.
        """
        if not self._channel.put(drawn(record)) and self._channel.missed == 1:
            self._first_missed = record.step

    def finish(self) -> None:
        """Write what waits.

        Raises:
            Exception: What went wrong in the thread, or it took too long.
        """
        if missed := self._channel.missed:
            self.remarks.append(
                f"the media of {counted(missed, 'record')} are left out, the first of step {self._first_missed}: they were "
                "logged faster than they can be written. Log media less often, or smaller ones"
            )
        self._channel.ask_close()
        self._channel.finish(60.0)

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, (ending, content) in self._box.of(record, _encoded).items():
                path = self.folder / path_of(name, record.step, ending)
                replaced = path.stat().st_size if path.exists() else None
                files, size = self._files + (replaced is None), self._bytes + len(content) - (replaced or 0)
                if files > FILES or size > BYTES:
                    if not any(remark.startswith("the directory") for remark in self.remarks):
                        self.remarks.append(
                            f"the directory keeps {FILES:,} media files and {BYTES // 1_000_000} MB at most; "
                            f"the first that is left out is {name!r} of step {record.step}"
                        )
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                beside = path.with_name(f"{path.name}.new")
                beside.write_bytes(content)
                beside.replace(path)
                self._files, self._bytes = files, size


def _encoded(medium: Media) -> tuple[str, bytes] | str:
    """Return the ending and the content of a file, or why there is none."""
    match medium:
        case Image():
            written = io.BytesIO()
            picture_of(medium).save(written, "png")
            return "png", written.getvalue()
        case Audio():
            return "wav", wave_of(medium)
        case Histogram():
            if (counted := counts_of(medium)) is None:
                return EMPTY
            counts, edges = counted
            return "json", json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}).encode()
        case Text(text):
            return "txt", text.encode(errors="backslashreplace")
    return "cannot be written as a file"
