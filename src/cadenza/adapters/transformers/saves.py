"""Checkpoints for callbacks of transformers: when one is written, and the name under which they look for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cadenza.engine.session import Session


class Saves:
    """The checkpoints of a run.

    Args:
        session: The session of the run.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.pending: int | None = None
        """The step of the checkpoint that is being written."""
        self.paths: dict[int | None, str] = {}
        """The checkpoints of this fit, by step."""

    def wait(self) -> None:
        """Write checkpoints before the training goes on, as transformers does."""
        for saver in self.session.savers:
            if hasattr(saver, "background"):
                saver.background = False

    def written(self, folder: str | None) -> str | None:
        """Return the path of the pending checkpoint, once; None if it is not written. Every rank must call this.

        Args:
            folder: Where to make a link to it for integrations; None makes none.
        """
        step, self.pending = self.pending, None
        if step is None:
            return None
        path = self._path(step)
        if path is not None and folder is not None:
            self._link(path, folder, step)
        if self.session.sync.together and self.session.driver.world_size > 1:
            path = self.session.driver.broadcast(path)  # the other ranks go on when there is a link
        if path is not None:
            self.paths[step] = path
        return path

    def _path(self, step: int) -> str | None:
        names = [one.data["checkpoint"] for one in self.session.decisions if one.what == "saved" and one.data["step"] == step]
        savers: list[Any] = [one for one in self.session.savers if hasattr(one, "store")]
        savers.sort(key=lambda saver: saver.weights_only)
        return f"{savers[0].store.files}/{names[-1]}" if names and savers else None

    def _link(self, path: str, folder: str, step: int) -> None:
        """Let ``FOLDER/checkpoint-STEP``, which integrations read, lead to a checkpoint; remove links to deleted ones."""
        if not self.session.is_main or "://" in path or "://" in folder:
            return
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for link in root.glob("checkpoint-*"):
            if link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)
        link = root / f"checkpoint-{step}"
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            try:
                link.symlink_to(os.path.relpath(path, root), target_is_directory=True)
            except OSError as error:  # some file systems have no links
                self.session.warn(f"{link} cannot be made a link to {path}: {error!r}. Callbacks that upload it do not find it")
