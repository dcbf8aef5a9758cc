"""The media of a run as files in its directory; see `branch_files`. The report shows them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cadenza.records.branch_files import MEDIA, path_of
from cadenza.records.formats import counted
from cadenza.records.record import Audio, Figure, Histogram, Image, Media, Record, Text
from cadenza.records.writer import Channel, Writer
from cadenza.sinks.media import MediaBox, counts_of, picture_of, wave_of

FILES, BYTES = 2_000, 200_000_000
"""What a directory keeps at most; later media are left out."""


class MediaFiles:
    """Writes media as PNG, WAV, JSON (the counts of a histogram) and text, in the writer thread of the run.

    A continued run replaces the files of the steps that it repeats.

    Args:
        directory: The run's directory.
        writer: The writer thread.
    """

    def __init__(self, directory: Path, writer: Writer) -> None:
        self.folder = directory / MEDIA
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
        drawn = {name: medium.drawn() if isinstance(medium, Figure) else medium for name, medium in record.media.items()}
        if not self._channel.put(replace(record, media=drawn)) and self._channel.missed == 1:
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
                return "has no values to show"
            counts, edges = counted
            return "json", json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}).encode()
        case Text(text):
            return "txt", text.encode(errors="backslashreplace")
    return "cannot be written as a file"
