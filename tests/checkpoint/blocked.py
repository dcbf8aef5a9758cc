"""A folder of checkpoints that cannot be written to for a while."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


class Blocked:
    """A file instead of the folder of checkpoints, from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.aside = folder, folder.with_name(f"{folder.name} aside")
        if folder.exists():
            self.aside.write_text("in the way")
            self._exchange()
        else:
            folder.write_text("in the way")
            self.aside.mkdir()

    def free(self) -> None:
        """Give the folder back."""
        self._exchange()

    def _exchange(self) -> None:
        """Exchange the two in one step: a save in the background, tried in between, would make a new folder."""
        names = (AT_FDCWD, os.fsencode(self.folder), AT_FDCWD, os.fsencode(self.aside), RENAME_EXCHANGE)
        if ctypes.CDLL(None, use_errno=True).renameat2(*names):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self.folder))
