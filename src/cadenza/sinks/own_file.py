"""Files at paths that the user chose. A sink never overwrites other files; a continued run continues its own file."""

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


def own_path(path: Path, info: RunInfo, *, sink: str, begins: str) -> Path:
    """Return the path of a sink's file, and make its folder. A relative path starts at the run's directory, if there is one.

    Args:
        path: As the user gave it.
        info: The run info.
        sink: The class name of the sink, for messages.
        begins: The first characters of a file of this sink. A continued run may replace such a file.

    Raises:
        DirectoryError: The file exists, is the run's own, or cannot be made.
    """
    target = info.base / path
    if info.directory is not None and target.resolve() == (info.directory / "metrics.jsonl").resolve():
        raise DirectoryError(f"{str(target)!r} is the run's own file of records. Give {sink} another name.")
    try:
        if target.exists() and not (info.continued and _begins(target, begins)):
            raise DirectoryError(
                f"{sink} would write {str(target)!r}, but the file exists and is not overwritten. Give another path, or move "
                "this one away."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab"):
            return target
    except DirectoryError:
        raise
    except OSError as error:
        raise DirectoryError(
            f"{sink} cannot write {str(target)!r}: {error.strerror or error}. Give a path where files can be made."
        ) from error


def own_folder(folder: Path, *, sink: str) -> Path:
    """Return a folder for files of a sink; it is made if it does not exist.

    Raises:
        DirectoryError: The folder or a file in it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # only a real file shows whether it can be written
            return folder
    except OSError as error:
        raise DirectoryError(
            f"{sink} cannot write to {str(folder)!r}: {error.strerror or error}. Give a directory where files can be made."
        ) from error


def earlier_records(info: RunInfo) -> Iterator[Record]:
    """Yield the records of a continued run up to ``info.step``."""
    if info.continued and info.directory is not None:
        yield from (record for record in read_records(info.directory / "metrics.jsonl") if record.step <= info.step)


def _begins(path: Path, expected: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(expected)) in (b"", expected.encode())
