"""A folder of checkpoints that cannot be written to for a while."""

from __future__ import annotations

from pathlib import Path


class Blocked:
    """A file instead of the folder of checkpoints, from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.aside = folder, folder.with_name(f"{folder.name} aside")
        if folder.exists():
            folder.rename(self.aside)
        folder.write_text("in the way")

    def free(self) -> None:
        """Give the folder back in one step: a save in the background, tried just then, must not make a new one."""
        link = self.folder.with_name(f"{self.folder.name} link")
        link.symlink_to(self.aside, target_is_directory=True)
        link.replace(self.folder)
