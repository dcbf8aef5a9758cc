"""The temporary directory of a replay."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Generator
from typing import Any


class Folder:
    """A temporary directory. The process that owns it deletes it at the latest when nothing refers to this object."""

    def __init__(self, path: str, *, owned: bool) -> None:
        self._finalizer = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        if not owned:
            self._finalizer.detach()

    def delete(self) -> None:
        """Delete it, once."""
        self._finalizer()


def within(folder: Folder, course: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Delete the folder after the run: also if the replay is left open, and its run ends when nothing refers to it."""
    try:
        yield from course
    finally:
        folder.delete()
