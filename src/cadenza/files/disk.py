"""Local files: open regular files only, flush them, and replace them whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading bytes. To open a FIFO or a device could block without end.

    Args:
        path: The file.
        follow: Whether it may be a symbolic link to a regular file.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be opened, or it is a folder, FIFO, socket or device, or a link although `follow` is false.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_WAIT | (0 if follow else _NO_LINK))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file such as ``run.json``; None if the file does not exist.

    Raises:
        ValueError: The file cannot be read, or it holds no JSON object; the message names the reason.
    """
    try:
        with open_regular(path) as file:
            content = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object; got {type(content).__name__}")
    return content


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk. Windows flushes no folders, and files only if they are open for writing.

    Some file systems flush no folders either, such as CIFS and several of FUSE. A warning says so, once in a process.

    Raises:
        OSError: The disk rejects it.
    """
    is_folder = path.is_dir()
    if is_folder and not _OPENS_FOLDERS:
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if _OPENS_FOLDERS else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _FLUSHES_NO_FOLDERS:
            raise
        _warn_of_folders(error.strerror)


@cache
def _warn_of_folders(reason: str) -> None:
    """Warn once in a process."""
    _logger.warning(
        f"this file system flushes no folders ({reason}). Files are flushed, but after a power cut a new file or checkpoint "
        "may lack its name. The end of a process loses nothing."
    )


class Unflushed:
    """Files that are written and not flushed. They stay open, so that no error of the disk is lost before `flush`.

    One flush after another is faster than each right after its write: the system writes in the meantime.
    """

    def __init__(self) -> None:
        self._open: list[BinaryIO] = []

    def add(self, file: BinaryIO) -> None:
        """Add an open file."""
        self._open.append(file)

    def flush(self) -> None:
        """Flush the files to the disk in the order in which they were added, and close them. Raises OSError."""
        for file in self._open:
            os.fsync(file.fileno())
        self.close()

    def close(self) -> None:
        """Close the files without a flush."""
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file written there replaces `path` as a whole; after an error it is removed."""
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)  # of a killed process; or a link, and its target would be written
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut may leave the new name with nothing in it
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


_FLUSHES_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)
_logger = logging.getLogger("cadenza")
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_OPENS_FOLDERS = hasattr(os, "O_DIRECTORY")
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
