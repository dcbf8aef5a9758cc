"""The facts about a run that sinks receive, also when it is replayed from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, as trackers know it."""

    id: str = ""
    """A unique name; the same when the run is continued. Empty without a directory."""

    directory: Path | None = None
    """The directory in which the run writes."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's arguments as plain data: the configuration that trackers show."""

    step: int = 0
    """Completed steps; more than 0 if the run is continued at a checkpoint."""

    continued: bool = False
    """Whether another process began it in this directory, so that its files are there; also if it starts anew at step 0."""

    home: Path = field(default_factory=lambda: working_directory())
    """The working directory when the trainer was made."""

    accumulate: int = 1
    """The number of batches in one step."""

    @property
    def base(self) -> Path:
        """The directory of relative paths: that of the run, or `home` if the run has none."""
        return self.directory or self.home

    @property
    def name(self) -> str:
        """A name to show: that of the directory; empty without one."""
        return "" if self.directory is None else self.directory.resolve().name


def working_directory() -> Path:
    """Return the present working directory; ``.`` if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()
