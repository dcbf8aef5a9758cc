"""The rows and media of a run, which a resume cuts, and their copies for each branch that the run has abandoned.

Media have a folder for each name and a file for each step: ``media/train%2Fimages/0000000012.png``. Copies are beside the
files: ``metrics.branch-0.jsonl``, ``media.branch-0``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from cadenza.files.disk import replacing

KEPT = 3
"""How many copies are kept of starts that saved nothing to continue from."""
ROWS = ("metrics.jsonl", "decisions.jsonl", "fingerprints.jsonl")
MEDIA = "media"
_NAME = 180  # characters of the name of a folder of media


def has_rows(directory: Path) -> bool:
    """Return whether the directory holds rows of a run."""
    return any((directory / name).exists() and (directory / name).stat().st_size for name in ROWS)


def cut(directory: Path, offsets: Mapping[str, int], step: int) -> None:
    """Drop the rows and media that were written after a checkpoint.

    Args:
        directory: The run's directory.
        offsets: The lengths of the files of rows, in bytes, when the checkpoint was saved.
        step: The step of the checkpoint.
    """
    for _, at, path in media_in(directory / MEDIA):
        if at > step:
            path.unlink(missing_ok=True)
    for path in (directory / name for name in ROWS):
        if path.exists():
            os.truncate(path, min(offsets.get(path.name, 0), path.stat().st_size))


def keep(directory: Path, branch: int) -> list[str]:
    """Copy the rows and media that a run has written, before a new branch begins. Return the names of the copies.

    Args:
        directory: The run's directory.
        branch: The number of the abandoned branch. It is part of the names.
    """
    kept = []
    for path in (directory / name for name in (*ROWS, MEDIA)):
        copy = _of_branch(path, branch)
        if path.is_dir():
            _copy_media(path, copy)
        elif path.exists():
            with replacing(copy) as beside:  # a kill leaves no partial copy
                shutil.copyfile(path, beside)
        else:
            continue
        kept.append(copy.name)
    return kept


def take_back(directory: Path, branch: int, offsets: Mapping[str, int], step: int) -> None:
    """Restore the rows and media that a branch had written when one of its checkpoints was saved; see `cut`.

    If no copy of a file exists for the number of the branch, the present file is cut.
    """
    for path in (directory / name for name in (*ROWS, MEDIA)):
        copy = _of_branch(path, branch)
        if copy.is_dir():
            _copy_media(copy, path)
        elif copy.exists():
            shutil.copyfile(copy, path)  # into the same file, which a log may have opened
    cut(directory, offsets, step)


def drop_old(directory: Path) -> None:
    """Delete the copies of all branches but the newest `KEPT`."""
    copies: dict[int, list[Path]] = {}
    for name in map(Path, (*ROWS, MEDIA)):
        for path in directory.glob(f"{name.stem}.branch-*{name.suffix}"):
            number = path.name.removeprefix(f"{name.stem}.branch-").removesuffix(name.suffix)
            if number.isdecimal():
                copies.setdefault(int(number), []).append(path)
    for branch in sorted(copies)[:-KEPT]:
        for path in copies[branch]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _of_branch(path: Path, branch: int) -> Path:
    return path.with_name(f"{path.stem}.branch-{branch}{path.suffix}")


def _copy_media(folder: Path, target: Path) -> None:
    """Replace `target` by the media of `folder`. Where the file system has hard links, the files are shared.

    This is safe, because a run replaces its files and does not write into them.
    """
    shutil.rmtree(target, ignore_errors=True)
    for _, _, path in media_in(folder):
        if path.is_symlink():
            continue
        copy = target / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copyfile(path, copy)


def media_in(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the name, step and path of each medium, in this order. Folders that are symbolic links are left out.

    A directory that comes from elsewhere shows no files of this machine.
    """
    for of_name in [] if folder.is_symlink() else sorted(folder.glob("*")):
        if of_name.is_symlink():
            continue
        for path in sorted(of_name.glob("*.*")):
            if path.stem.isdecimal():
                yield unquote(of_name.name), int(path.stem), path


def path_of(name: str, step: int, ending: str) -> Path:
    """Return the path of a medium in the folder: without separators and dots of `name`, whatever it holds.

    >>> path_of("train/images", 12, "png").as_posix(), path_of("../x", 1, "txt").as_posix()
    ('train%2Fimages/0000000012.png', '%2E%2E%2Fx/0000000001.txt')
    """
    folder = quote(name.encode(errors="backslashreplace"), safe="")[:_NAME].replace(".", "%2E") or "%"
    return Path(folder, f"{step:010}.{ending}")
