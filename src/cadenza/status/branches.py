"""Branches of a run. A rollback begins a new branch, and abandons the later checkpoints of the old one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Saved(NamedTuple):
    """A checkpoint in a store. Checkpoints are ordered by step, then by number if a step was saved again; never by time."""

    step: int
    again: int
    name: str

    @staticmethod
    def named(name: str) -> Saved | None:
        """Return the checkpoint with this name; None if no checkpoint can have the name."""
        match = _NAME.fullmatch(name)
        return None if match is None else Saved(int(match[1]), int(match[2] or 1), name)


class Point(NamedTuple):
    """A checkpoint by run, branch and name, at which another branch began."""

    run: str
    branch: int
    name: str

    @property
    def saved(self) -> Saved:
        """The checkpoint, in the order of its branch."""
        saved = Saved.named(self.name)
        if saved is None:
            raise ValueError(f"{self.name!r} is not the name of a checkpoint")
        return saved


Rank = tuple[int, int, int, int]
"""The sort key of the checkpoints of a run: abandoned ones first, then the line of the present branch, oldest first."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of checkpoints: those of this branch, and those of earlier branches up to the points at which they were left."""

    run: str = ""
    """The id of the run."""
    number: int = 0
    """A rollback or a new start gets the next number of the run."""
    ancestors: tuple[Point, ...] = ()
    """The points at which earlier branches were left, oldest first, including other runs."""
    at: str | None = None
    """The name of the checkpoint at which this process continues."""

    @staticmethod
    def of(plain: Mapping[str, Any], run: str) -> Branch:
        """Return the branch from the result of `to_plain`. Without a number, as older versions wrote it, the branch is 0.

        Raises:
            ValueError, TypeError: `plain` describes no branch.
        """
        if not isinstance(run, str):
            raise TypeError(f"the id of a run must be a string; got {run!r}")
        if not isinstance(plain, Mapping):
            raise TypeError(f"a branch must be a mapping; got {plain!r}")
        number, ancestors = plain.get("branch", 0), plain.get("ancestors", [])
        points = tuple(Point(*point) for point in ancestors)
        wrong = [point for point in points if not isinstance(point.run, str) or not point.saved]
        if wrong or not all(type(number_) is int and number_ >= 0 for number_ in (number, *(point.branch for point in points))):
            raise ValueError(f"branch {number!r} with the ancestors {ancestors!r} is no branch")
        return Branch(owner_of(run), number, points)

    def to_plain(self) -> dict[str, Any]:
        """Return the branch as plain data, without the id of the run."""
        return {"branch": self.number, "ancestors": [list(point) for point in self.ancestors]}

    def point(self, name: str) -> Point:
        """Return a checkpoint of this branch as a point at which another branch can begin."""
        return Point(self.run, self.number, name)

    def rank(self, saved: Saved, branch: Branch) -> Rank | None:
        """Return the sort key of a checkpoint of `branch`, seen from this branch; None if it belongs to another run.

        The first number is 1 on the line of this branch, and 0 for abandoned checkpoints.
        """
        if (branch.run, branch.number) == (self.run, self.number):
            return (1, len(self.ancestors), saved.step, saved.again)
        for index, point in enumerate(self.ancestors):
            if (branch.run, branch.number) == (point.run, point.branch) and saved[:2] <= point.saved[:2]:
                return (1, index, saved.step, saved.again)
        return (0, branch.number, saved.step, saved.again) if branch.run == self.run else None


def owner_of(writer: str) -> str:
    """Return the id of the run to which a writer belongs: a second `Checkpoint` writes as ``id/name``."""
    return writer.partition("/")[0]


def newest_branches(branches: Iterable[Branch]) -> list[Branch]:
    """Return the newest branch of each run."""
    newest: dict[str, Branch] = {}
    for branch in branches:
        if branch.run not in newest or newest[branch.run].number < branch.number:
            newest[branch.run] = branch
    return list(newest.values())


def present(branches: Iterable[Branch]) -> list[Branch]:
    """Return the newest branch of each run, without runs that another run continues."""
    newest = newest_branches(branches)
    continued = {point.run for branch in newest for point in branch.ancestors if point.run != branch.run}
    return [branch for branch in newest if branch.run not in continued]
