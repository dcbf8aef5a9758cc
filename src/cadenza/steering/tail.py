"""The end of a file of lines, read backwards: the time depends on the wanted lines, and not on the length of the file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

MOST = 32 << 20
"""The bytes that a question reads of a file unless all of it is asked for: about 20 ms."""
_BLOCK = 1 << 18


class Tail:
    """The complete lines of a file, the last one first. A file that does not exist has none.

    A last line without its end is left out: the run still writes it, was killed, or a copy was made in between.

    Args:
        path: The file.
        most: The bytes to read at most; None reads up to the beginning.
    """

    def __init__(self, path: str | os.PathLike[str], most: int | None = MOST) -> None:
        self._path, self._most = path, most
        self.complete: bool = True
        """Whether the lines that were iterated reach back to the beginning of the file, or to the line that ended the loop."""

    def lines(self, having: bytes = b"") -> Iterator[bytes]:
        """Yield the lines that contain some bytes; without an argument, all."""
        try:
            file = opened(self._path)
        except FileNotFoundError:
            return
        with file:
            yield from self._lines(file, having)

    def _lines(self, file: BinaryIO, having: bytes) -> Iterator[bytes]:
        end = os.fstat(file.fileno()).st_size
        least = 0 if self._most is None else max(0, end - self._most)
        later, first = b"", True  # the beginning of the line that the block before completes
        while end > least:
            start = max(least, end - _BLOCK)
            file.seek(start)
            block = file.read(end - start) + later
            end = start
            if first:
                block, first = block[: block.rfind(b"\n") + 1], b"\n" not in block
            cut = block.find(b"\n") + 1 if start else 0
            later, block = (block[:cut], block[cut:]) if cut or not start else (block, b"")
            yield from _found(block, having)
        self.complete = least == 0


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. To open a FIFO or a device could block without end.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be opened, or it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)!r} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _found(block: bytes, having: bytes) -> Iterator[bytes]:
    """Yield the lines of a block of whole lines, the last one first."""
    end = len(block)
    while end > 0:
        at = block.rfind(having, 0, end) if having else end - 1
        if at < 0:
            return
        start = block.rfind(b"\n", 0, at) + 1
        yield block[start : block.find(b"\n", at) + 1]
        end = start
