"""Files in a place of the user's choice: nothing of others is overwritten, and a run that is continued goes on in its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.errors import DirectoryError
from cadenza.records.reading import read_records

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.run_info import RunInfo


def own_place(path: Path, facts: RunInfo, *, sink: str, begins: str) -> Path:
    """Return the place of a sink's file, its folder made; a relative one lies in the run's directory, if there is one.

    Args:
        path: As the user gave it.
        facts: Of the run.
        sink: Who asks, for messages.
        begins: How a file of this sink begins. If the run is continued, such a file may be there: it will be written anew.

    Raises:
        DirectoryError: The file exists, is the run's own, or cannot be made.
    """
    place = facts.base / path
    if facts.directory is not None and place.resolve() == (facts.directory / "metrics.jsonl").resolve():
        raise DirectoryError(f"{str(place)!r} is the run's own file, which holds every record: give {sink} another name")
    try:
        if place.exists() and not (facts.continued and _begins(place, begins)):
            raise DirectoryError(
                f"{sink} would write {str(place)!r}, which exists, and nothing is overwritten: give another path, or move this "
                "one away"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab"):
            return place
    except DirectoryError:
        raise
    except OSError as error:
        raise DirectoryError(
            f"{sink} cannot write {str(place)!r}: {error.strerror or error}. Give a path where files can be made."
        ) from error


def own_folder(folder: Path, *, sink: str) -> Path:
    """Return a folder for files of a sink, made if it is not there.

    Raises:
        DirectoryError: It cannot be made, or no file in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # asked of the file system, as rights alone do not tell
            return folder
    except OSError as error:
        raise DirectoryError(
            f"{sink} cannot write to {str(folder)!r}: {error.strerror or error}. Give a directory in which files can be made."
        ) from error


def former_records(facts: RunInfo) -> Iterator[Record]:
    """Yield what a continued run logged up to its checkpoint: ``metrics.jsonl`` is cut there already, and lacks nothing."""
    if facts.continued and facts.directory is not None:
        yield from read_records(facts.directory / "metrics.jsonl")


def _begins(place: Path, expected: str) -> bool:
    with place.open("rb") as file:
        return file.read(len(expected)) in (b"", expected.encode())
