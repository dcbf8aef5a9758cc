"""A run directory with a new name for each start of a script."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cadenza.files.paths import local_path


class NewDirectory:
    """A directory that gets its name when a trainer takes it; see `new_directory`."""

    def __init__(self, parent: str | os.PathLike[str], name: str) -> None:
        if not name or not re.fullmatch(r"[^/\\:\0]+", name):
            raise ValueError(f"name must be a part of a path, such as 'baseline'; got {name!r}")
        if "://" in os.fspath(parent):
            raise ValueError(f"parent must be a local folder; got the URL {os.fspath(parent)!r}")
        self.parent: Path = local_path(parent).absolute()
        self.name: str = name

    def __repr__(self) -> str:
        return f"new_directory({str(self.parent)!r}, {self.name!r})"

    def make(self) -> Path:
        """Make the directory, under a name that no other process has taken, and return its path."""
        self.parent.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(re.escape(self.name) + r"-(\d+)")
        taken = [int(found[1]) for path in self.parent.iterdir() if (found := pattern.fullmatch(path.name))]
        number = max(taken, default=0)
        while True:
            number += 1
            path = self.parent / f"{self.name}-{number}"
            try:
                path.mkdir()
            except FileExistsError:  # another trial was faster
                continue
            return path


def new_directory(parent: str | os.PathLike[str], name: str = "run") -> NewDirectory:
    """Return a directory for ``Trainer(directory=...)`` that has a new name at each start: ``runs/baseline-1``, ``-2``, ...

    The trainer makes it, and has its path as ``trainer.directory``. Of multiple ranks the main process chooses the name. A run
    in it cannot be continued by starting the script again, so ``fit(resume="auto")`` is an error: a run that may be killed
    needs a name of its own.

    Args:
        parent: The folder of the runs. It is made if it is not there.
        name: The first part of the name.

    Raises:
        ValueError: `name` is no part of a path, or `parent` is a URL.

    >>> new_directory("runs", "baseline").name
    'baseline'
    """
    return NewDirectory(parent, name)


def meant_instead(path: Path) -> str:
    """Return a sentence about a run beside `path` if the name of `path` is a misspelling of its name; empty if there is none.

    Two swapped letters, and one that is missing or added inside the name, are misspellings. Different numbers, last letters or
    replaced letters are not: ``shape`` and ``shake`` are two names.

    >>> meant_instead(Path("runs/baselien"))
    ''
    """
    beside = {file.parent.name: file.parent for file in path.parent.glob("*/run.json")}
    series = re.sub(r"\d+|.$", "", path.name)  # such as lr-0.1 and lr-0.2, or fold-a and fold-b
    for name in sorted(beside):
        if re.sub(r"\d+|.$", "", name) != series and _is_misspelling(path.name, name):
            return f" Did you mean {str(beside[name])!r}, which holds a run?"
    return ""


def _is_misspelling(name: str, other: str) -> bool:
    shorter, longer = sorted((name, other), key=len)
    if len(shorter) == len(longer):
        differ = [index for index, pair in enumerate(zip(name, other, strict=True)) if pair[0] != pair[1]]
        return len(differ) == 2 and sorted(name) == sorted(other)
    return any(longer[:index] + longer[index + 1 :] == shorter for index in range(len(longer) - 1))
