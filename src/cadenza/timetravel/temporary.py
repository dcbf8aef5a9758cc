"""The temporary directory of a replay."""

from __future__ import annotations

import atexit
import shutil
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cadenza.engine.loop import Training


class Folder:
    """A temporary directory. The process that owns it deletes it at the latest when nothing refers to this object."""

    def __init__(self, path: str, *, owned: bool) -> None:
        self._finalizer = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        if not owned:
            self._finalizer.detach()

    def delete(self) -> None:
        """Delete it, once."""
        self._finalizer()


@contextmanager
def within(folder: Folder, part: AbstractContextManager[Training]) -> Iterator[Training]:
    """Delete the folder after the run: also if the replay is left open, and its run ends when nothing refers to it."""
    try:
        with part as training:
            yield training
    finally:
        folder.delete()


def close_at_exit(opened: Any) -> None:
    """Call ``opened.close()`` at the end of the process, while all modules are there, if the object exists then."""
    held = weakref.ref(opened)

    def close() -> None:
        if (left := held()) is not None:
            left.close()

    atexit.register(close)
