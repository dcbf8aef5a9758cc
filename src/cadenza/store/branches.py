"""Branches of a run: a rollback begins a new one, and what the branch before saved after that point is abandoned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Saved(NamedTuple):
    """A checkpoint in a store. They are ordered by step, and by number where a step was saved again; never by time."""

    step: int
    again: int
    name: str

    @staticmethod
    def named(name: str) -> Saved | None:
        """Return the checkpoint that has this name; None if the name is not that of a checkpoint."""
        match = _NAME.fullmatch(name)
        return None if match is None else Saved(int(match[1]), int(match[2] or 1), name)


class Point(NamedTuple):
    """A checkpoint by run, branch and name: where a later branch began."""

    run: str
    branch: int
    name: str

    @property
    def saved(self) -> Saved:
        """Its place in the order of its branch."""
        saved = Saved.named(self.name)
        if saved is None:
            raise ValueError(f"{self.name!r} is not the name of a checkpoint")
        return saved


Rank = tuple[int, int, int, int]
"""The order of a run's checkpoints: abandoned ones first, then those on the line of the present branch, oldest first."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a run's checkpoints: its own, and those of earlier branches up to the points at which these were left."""

    run: str = ""
    """The id of the run."""
    number: int = 0
    """A rollback, or a new start, takes the next number of the run."""
    ancestors: tuple[Point, ...] = ()
    """The points at which earlier branches were left, oldest first; those of other runs too."""
    at: str | None = None
    """The name of the checkpoint at which this process continued."""

    @staticmethod
    def of(plain: Mapping[str, Any], run: str) -> Branch:
        """Return the branch that `to_plain` described. Older versions wrote none: all is branch 0 then.

        Raises:
            ValueError, TypeError: It describes no branch.
        """
        if not isinstance(run, str):
            raise TypeError(f"the id of a run must be a string; got {run!r}")
        number, ancestors = plain.get("branch", 0), plain.get("ancestors", [])
        points = tuple(Point(*point) for point in ancestors)
        wrong = [point for point in points if not isinstance(point.run, str) or not point.saved]
        if wrong or not all(type(one) is int and one >= 0 for one in (number, *(point.branch for point in points))):
            raise ValueError(f"branch {number!r} with the ancestors {ancestors!r} is no branch")
        return Branch(owner_of(run), number, points)

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data, without the id of the run."""
        return {"branch": self.number, "ancestors": [list(point) for point in self.ancestors]}

    def point(self, name: str) -> Point:
        """Return a checkpoint of this branch as a point at which another one can begin."""
        return Point(self.run, self.number, name)

    def rank(self, saved: Saved, branch: Branch) -> Rank | None:
        """Return the place of a checkpoint of `branch` in the order of this branch's run; None if it belongs to another run.

        The first number is 1 on the line of this branch, and 0 for what is abandoned.
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
    """Return the newest branch of each run, without the runs that another one continues."""
    newest = newest_branches(branches)
    continued = {point.run for branch in newest for point in branch.ancestors if point.run != branch.run}
    return [branch for branch in newest if branch.run not in continued]
