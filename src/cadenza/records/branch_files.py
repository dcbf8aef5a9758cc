"""Copies of the rows and media of abandoned branches, beside the files of rows and ``media``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cadenza.files.disk import replacing
from cadenza.records import media_folder

KEPT = 3
"""How many copies are kept of starts that saved nothing to continue from."""
ROWS = ("metrics.jsonl", "decisions.jsonl", "fingerprints.jsonl")


def keep(directory: Path, branch: int) -> list[str]:
    """Copy the rows and media that a run has written, before a new branch begins. Return the names of the copies.

    Args:
        directory: The run's directory.
        branch: The number of the abandoned branch. It is part of the names: ``metrics.branch-0.jsonl``.
    """
    kept = []
    for name in ROWS:
        if (directory / name).exists():
            copy = _copy_of(directory, name, branch)
            with replacing(copy) as beside:  # a kill leaves no partial copy
                shutil.copyfile(directory / name, beside)
            kept.append(copy.name)
    if (directory / media_folder.FOLDER).is_dir():
        copy = _copy_of(directory, media_folder.FOLDER, branch)
        media_folder.copy(directory / media_folder.FOLDER, copy)
        kept.append(copy.name)
    return kept


def drop_old(directory: Path) -> None:
    """Delete the copies of all branches but the newest `KEPT`."""
    copies: dict[int, list[Path]] = {}
    for name in (*map(Path, ROWS), Path(media_folder.FOLDER)):
        for path in directory.glob(f"{name.stem}.branch-*{name.suffix}"):
            number = path.name.removeprefix(f"{name.stem}.branch-").removesuffix(name.suffix)
            if number.isdecimal():
                copies.setdefault(int(number), []).append(path)
    for branch in sorted(copies)[:-KEPT]:
        for path in copies[branch]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def has_rows(directory: Path) -> bool:
    """Return whether the directory holds rows of a run."""
    return any((directory / name).exists() and (directory / name).stat().st_size for name in ROWS)


def take_back(directory: Path, branch: int, offsets: Mapping[str, int], step: int) -> None:
    """Restore the rows and media that a branch had written when one of its checkpoints was saved.

    Args:
        directory: The run's directory.
        branch: The number of the branch that wrote the checkpoint. If no copy of its rows exists, the present files are cut.
        offsets: The lengths of the files in bytes at that time.
        step: The step of the checkpoint.
    """
    copy = _copy_of(directory, media_folder.FOLDER, branch)
    if copy.exists():
        media_folder.copy(copy, directory / media_folder.FOLDER, step)
    else:
        media_folder.cut(directory / media_folder.FOLDER, step)
    for name in ROWS:
        copy, length = _copy_of(directory, name, branch), offsets.get(name, 0)
        if copy.exists():
            with copy.open("rb") as source, (directory / name).open("wb") as target:
                target.write(source.read(length))
        else:
            cut(directory / name, length)


def cut(path: Path, length: int) -> None:
    """Cut a file to a length in bytes, unless it is shorter or does not exist."""
    if path.exists():
        os.truncate(path, min(length, path.stat().st_size))


def _copy_of(directory: Path, name: str, branch: int) -> Path:
    path = directory / name
    return path.with_name(f"{path.stem}.branch-{branch}{path.suffix}")
