"""Paths that a user gives, with ``~`` for the home directory."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path


def local_path(path: str | PathLike[str]) -> Path:
    """Return a local path; a leading ``~`` or ``~user`` becomes the home directory of the user, if there is one."""
    return Path(local_text(path))


def is_local(path: str) -> bool:
    r"""Return whether a path names no other machine: it is neither a URL nor a network folder of Windows.

    >>> [is_local(path) for path in ("runs/a", "/data/a", "s3://bucket/a", "//server/a", r"\\server\a")]
    [True, True, False, False, False]
    """
    return "://" not in path and not path.startswith(("//", "\\\\"))


def local_text(path: str | PathLike[str]) -> str:
    """Return a local path or a URL as a text, with the home directory as in `local_path`.

    Raises:
        TypeError: `path` is not a path.
        ValueError: `path` is empty, as an unset variable is, and would name the current folder.
    """
    if not isinstance(path, str | PathLike):
        kind = type(path).__name__
        raise TypeError(f"expected a path, a str or os.PathLike; got {kind}. The directory of a run is run.info.directory.")
    if not (text := os.fspath(path)).strip():
        raise ValueError(
            f"expected the path of a folder or a file; got {text!r}. Give its name, or '.' for the current folder."
        )
    return os.path.expanduser(text)  # Path.expanduser raises for "~unknown", a valid file name
