"""Run directories as the commands show them: which there are, in which state, and their best values."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from cadenza.commands.output import complain
from cadenza.errors import DirectoryError
from cadenza.files.disk import open_regular
from cadenza.files.locking import LOCK, is_held
from cadenza.report.best import best_of
from cadenza.report.evaluations import evaluation_results
from cadenza.report.settings import settings_of
from cadenza.report.story import Series, Story, story_at
from cadenza.status.formats import local_date

FILES = ("run.json", "metrics.jsonl")
"""A folder with one of these is a run directory."""
SUCCESS = ("running", "elsewhere", "finished", "stopped")
"""The states that are no failure."""
_LIST_S = 10.0
_MOST = 100


@dataclass(frozen=True)
class RunFolder:
    """A run directory that was read."""

    path: Path
    state: str
    """``running``, ``elsewhere``, ``killed``, or the kind of its `Outcome`; ``unknown`` without a ``run.json``."""
    story: Story

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The trainer's arguments; see `settings_of`."""
        return settings_of(self.story.info)

    @cached_property
    def watched(self) -> list[str]:
        """The names of the metrics that a callback watched."""
        return list(dict.fromkeys(name for name, _, _ in self.story.watched))

    @property
    def ending(self) -> str:
        """A sentence about its state."""
        return ending(self.path, self.state, self.story)


def read(path: Path, *, names: Collection[str] | None = None) -> RunFolder:
    """Read a run directory. For `names` see `story_at`.

    Raises:
        DirectoryError: The directory holds no run.
    """
    held = is_held(path)  # before run.json: a run that ends in between has its outcome there
    story = story_at(path, names=names, checkpoints=False)
    return RunFolder(path, state_of(path, held, story), story)


def state_of(path: Path, held: bool, story: Story) -> str:
    """Return the state of a run: whether a process holds its directory, and the content of its ``run.json``.

    ``elsewhere``: a process of another machine held the directory, so whether it still does is not visible from here.
    """
    if held or story.kind or not story.info:
        return "running" if held else story.kind or "unknown"
    return "killed" if holder_in(path)[1] in ("", platform.node()) else "elsewhere"


def holder_in(path: Path) -> tuple[str, str]:
    """Return the id of the process that held a directory last, and the name of its machine; empty if unknown."""
    try:
        with open_regular(path / LOCK) as file:
            holder = re.match(r"process (\d+) on (.*)", file.read(1000).decode(errors="replace"))
    except OSError:
        return "", ""
    return ("", "") if holder is None else (holder[1], holder[2].strip())


def ending(path: Path, state: str, story: Story) -> str:
    """Return a sentence about a state."""
    last = "no record" if story.seen is None else f"last record at {local_date(story.seen)}, {story.reached}"
    if state == "running":
        return f"running: {last}"
    if state == "killed":
        return f"killed: no process holds the directory and run.json has no outcome; {last}"
    if state == "elsewhere":
        where = holder_in(path)[1]
        return f"elsewhere: a process on {where} trained it, and whether it still does is not visible from here; {last}"
    if state == "unknown":
        return f"unknown: the directory has no readable run.json; {last}"
    return story.ending


def found(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield each run directory in folders and below them, not those inside of a run. Hidden folders are left out.

    Raises:
        DirectoryError: A folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise DirectoryError(f"{str(folder)!r} is not a folder. Give a folder that holds run directories.")
        for path, below, files in os.walk(folder, onerror=lambda error: complain(f"a folder cannot be read: {error}")):
            if any(name in FILES for name in files):
                below.clear()
                yield Path(path)
            below[:] = sorted(name for name in below if not name.startswith("."))


class NamedRuns:
    """The runs of a directory by name, for servers: looked for anew every ten seconds.

    A name that comes from outside is only looked up: it is never used as a path. Links to folders are not followed.

    Args:
        directory: A run directory, or a folder of run directories. The run may be starting.

    Raises:
        DirectoryError: The directory does not exist, or it holds no run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Path = directory
        self._listed_s = float("-inf")
        self._paths: dict[str, Path] = {}
        if not self.paths():
            problem = f"{str(directory)!r} is not a run directory, and holds none"
            raise DirectoryError(f"{problem}. Give the directory= of a run, or a folder of such.")

    def paths(self) -> dict[str, Path]:
        """Return the first hundred run directories by name."""
        if time.monotonic() - self._listed_s > _LIST_S:
            paths = [self.directory] if is_held(self.directory) else found([self.directory])
            self._paths = {self._name(path): path for path in islice(paths, _MOST)}
            self._listed_s = time.monotonic()
        return self._paths

    def _name(self, path: Path) -> str:
        return path.resolve().name if path == self.directory else path.relative_to(self.directory).as_posix()


def values_of(folder: RunFolder, name: str) -> tuple[float | None, float | None]:
    """Return the best and the last value of a metric. No callback watched it: no best. It was not logged: no last."""
    story = folder.story
    best, results = best_of(story, name), [row[name] for row in evaluation_results(story).rows.values() if name in row]
    last = last_of(story.series.get(name)) if name in story.series else None
    return None if best is None else best.value, results[-1] if last is None and results else last


def last_of(series: Series | None) -> float | None:
    """Return the last value of a series; None if there is none."""
    return series.values[-1] if series else None
