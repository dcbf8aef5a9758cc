"""Checkpoints for transformers callbacks: when they are written, and under which name callbacks find them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint.catalogue import LINK
from cadenza.checkpoint.writer import CheckpointWriter
from cadenza.compat.adapter.view import OfRun

if TYPE_CHECKING:
    from cadenza.run import Run

_CONFIGURATIONS = ("config.json", "adapter_config.json")


class Saves(OfRun):
    """The checkpoints of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.pending: int | None = None
        """The step of the checkpoint that is being written."""
        self.paths: dict[int | None, str] = {}
        """The checkpoints of this fit, by step."""

    def wait(self) -> None:
        """Write checkpoints before the training continues, as transformers does."""
        for saver in self.session.savers:
            if isinstance(saver, CheckpointWriter):
                saver.stay_in_foreground()

    def written(self, folder: str | None, state: Any) -> bool:
        """Return whether the pending checkpoint is written, and record it in the state. Every rank must call this.

        Args:
            folder: Where integrations look for ``checkpoint-STEP``; None if the list has none.
            state: The ``TrainerState``, which gets the path of the best checkpoint.
        """
        step, self.pending = self.pending, None
        if step is None:
            return False
        path = self._path(step)
        if path is not None and "://" not in path and self.session.driver.is_main:
            path = self._shown(path, folder, step)
        path = self._of_main(path)
        if path is None:
            return False
        self.paths[step] = path
        state.best_model_checkpoint = self.paths.get(state.best_global_step, state.best_model_checkpoint)
        if self.session.driver.is_main and folder is not None and _is_ours(shown := Path(folder) / f"checkpoint-{step}"):
            state.save_to_json(str(shown / "trainer_state.json"))
        if self._several:
            self.session.driver.barrier()  # other ranks continue once the folder exists
        return True

    def note_best(self, state: Any) -> None:
        """Record the path of the best checkpoint in the state if it was written in the background.

        Every rank must call this.
        """
        step = state.best_global_step
        if step is None or step in self.paths:
            return
        path = self._path(step) if self.session.driver.is_main else None
        if path is not None and "://" not in path:
            path = str(_pretrained(Path(path)) or path) if Path(path).is_dir() else None
        state.best_model_checkpoint = self._of_main(path) or state.best_model_checkpoint

    def within(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``TrainerState`` for a checkpoint: the best path is relative to the run, which may move."""
        path, directory = state["best_model_checkpoint"], self.session.directory
        if path is not None and directory is not None and Path(path).is_relative_to(directory):
            path = Path(path).relative_to(directory).as_posix()
        return {**state, "best_model_checkpoint": path}

    def placed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the original path of `within`, in the current directory of the run."""
        path, directory = state["best_model_checkpoint"], self.session.directory
        if path is not None and directory is not None and "://" not in path:
            path = str(directory / path)
        return {**state, "best_model_checkpoint": path}

    @property
    def _several(self) -> bool:
        """Whether all of multiple ranks are participating."""
        return self.session.sync.together and self.session.driver.world_size > 1

    def _of_main(self, path: str | None) -> str | None:
        """Return the main process's path."""
        given: str | None = self.session.driver.broadcast(path) if self._several else path
        return given

    def _path(self, step: int) -> str | None:
        saved = [decision.data for decision in self.session.run.decisions if decision.what == "saved"]
        names = [data["checkpoint"] for data in saved if data["step"] == step]
        savers: list[Any] = [saver for saver in self.session.savers if hasattr(saver, "store")]
        savers.sort(key=lambda saver: saver.weights_only)
        return f"{savers[0].store.files}/{names[-1]}" if names and savers else None

    def _shown(self, path: str, folder: str | None, step: int) -> str:
        """Return the path that callbacks get: with the files of ``save_pretrained``, if the checkpoint has them."""
        pretrained = _pretrained(Path(path))
        if folder is None or "://" in folder:
            return path if pretrained is None else str(pretrained)
        root = Path(folder).absolute()
        root.mkdir(parents=True, exist_ok=True)
        _remove_old(root)
        shown = root / f"checkpoint-{step}"
        if shown.exists() and not _is_ours(shown):
            self.session.warn(f"{shown} is there, and is not of this run. Callbacks that upload it do not find the checkpoint")
            return path
        try:
            _fill(shown, Path(path), pretrained)
        except OSError as error:  # some file systems have no links
            self.session.warn(f"{shown} cannot be made of links to {path}: {error!r}. Callbacks that upload it do not find it")
            return path
        return path if pretrained is None else str(shown)


def _pretrained(checkpoint: Path) -> Path | None:
    """Return the folder in a checkpoint that ``from_pretrained`` reads; None if it has none."""
    return next((path.parent for path in checkpoint.glob("*/*config.json") if path.name in _CONFIGURATIONS), None)


def _fill(folder: Path, checkpoint: Path, pretrained: Path | None) -> None:
    """Make a folder with links to the files, so that a callback may add files."""
    folder.mkdir(exist_ok=True)
    for name, target in [(LINK, checkpoint), *((path.name, path) for path in (pretrained or checkpoint).iterdir())]:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, folder), target_is_directory=target.is_dir())


def _is_ours(folder: Path) -> bool:
    return (folder / LINK).is_symlink()


def _remove_old(root: Path) -> None:
    """Remove the folders of checkpoints that were deleted."""
    for path in root.glob("checkpoint-*"):
        if _is_ours(path) and not (path / LINK).exists():
            shutil.rmtree(path, ignore_errors=True)
