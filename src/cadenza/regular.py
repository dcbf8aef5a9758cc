"""Open files for reading that may be anything: a FIFO or a device would make the reader wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading bytes.

    Args:
        path: The file.
        follow: Whether it may be a symbolic link to a regular file.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be opened, or is a folder, FIFO, socket, device, or a link although `follow` is false.
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


_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
