"""The work directory of a ``NeuralModuleFactory``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from cadenza.compat.neural.logs import logging
from cadenza.drivers import Driver
from cadenza.status.masking import masked_command


class WorkDirectory:
    """``checkpoints/``, ``tensorboard/``, the command line, the state of the git repository, the log, and copies of files.

    Args:
        path: Created if it does not exist; None writes nothing.
        checkpoints: The folder of checkpoints; None: in the work directory.
        tensorboard: The folder of event files; None: in the work directory.
        stamped: Use a subfolder with the time as its name.
        files_to_copy: Files to copy, with the time in their names.
        driver: The driver of a multi-process run. The main process writes; each process has its own log.
    """

    def __init__(
        self,
        path: str | None,
        checkpoints: str | None = None,
        tensorboard: str | None = None,
        stamped: bool = False,
        files_to_copy: Iterable[str] = (),
        driver: Driver | None = None,
    ) -> None:
        now = time.strftime("%Y-%m-%d_%H-%M-%S")
        if driver is not None:
            now = driver.broadcast(now)
        self.path: Path | None = None if path is None else Path(path, now if stamped else "").absolute()
        self.checkpoints: Path | None = self._inside(checkpoints, "checkpoints")
        self.tensorboard: Path | None = self._inside(tensorboard, "tensorboard")
        for folder in (self.path, self.checkpoints):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        if self.path is not None:
            if driver is None or driver.is_main:
                self._note(self.path, now, files_to_copy)
            rank, local_rank = (0, 0) if driver is None else (driver.rank, driver.local_rank)
            logging.keep_in(self.path / f"log_globalrank-{rank}_localrank-{local_rank}.txt")

    def _inside(self, given: str | None, name: str) -> Path | None:
        if given is not None:
            return Path(given).absolute()
        return None if self.path is None else self.path / name

    def _note(self, path: Path, now: str, files: Iterable[str]) -> None:
        (path / f"cmd-args_{now}.log").write_text(" ".join(masked_command(sys.argv)) + "\n", encoding="utf-8")
        if (said := _git()) is not None:
            (path / f"git-info_{now}.log").write_text(said, encoding="utf-8")
        for name in files:
            file = Path(name)
            shutil.copy(file, path / f"{file.stem}_{now}{file.suffix}")


def _git() -> str | None:
    try:
        command = ["git", "log", "-1", "--format=commit hash: %H%ndate: %ad"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
        changed = subprocess.run(["git", "diff"], capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + changed
