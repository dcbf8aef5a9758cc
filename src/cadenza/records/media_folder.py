"""The media of a run directory: one folder for each name, one file for each step, ``media/train%2Fimages/0000000012.png``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

FOLDER = "media"
_NAME = 180  # characters of a folder's name


def path_of(name: str, step: int, ending: str) -> Path:
    """Return the path of a medium in the folder: without separators and dots of `name`, whatever it holds.

    >>> path_of("train/images", 12, "png").as_posix(), path_of("../x", 1, "txt").as_posix()
    ('train%2Fimages/0000000012.png', '%2E%2E%2Fx/0000000001.txt')
    """
    folder = quote(name.encode(errors="backslashreplace"), safe="")[:_NAME].replace(".", "%2E") or "%"
    return Path(folder, f"{step:010}.{ending}")


def files_in(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the name, step and path of each medium, in this order. Folders that are symbolic links are left out.

    A directory that comes from elsewhere shows no files of this machine.
    """
    for of_name in [] if folder.is_symlink() else sorted(folder.glob("*")):
        if of_name.is_symlink():
            continue
        for path in sorted(of_name.glob("*.*")):
            if path.stem.isdecimal():
                yield unquote(of_name.name), int(path.stem), path


def cut(folder: Path, step: int) -> None:
    """Remove the media of later steps."""
    for _, at, path in files_in(folder):
        if at > step:
            path.unlink(missing_ok=True)


def copy(folder: Path, target: Path, step: int | None = None) -> None:
    """Replace `target` by the media of `folder` up to a step. Where the file system has hard links, the files are shared.

    This is safe, because a run replaces its files and does not write into them.
    """
    shutil.rmtree(target, ignore_errors=True)
    for _, at, path in files_in(folder):
        if path.is_symlink() or (step is not None and at > step):
            continue
        beside = target / path.parent.name / path.name
        beside.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, beside)
        except OSError:
            shutil.copyfile(path, beside)
