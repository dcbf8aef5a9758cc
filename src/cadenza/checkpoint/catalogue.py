"""The checkpoints of a run in the order of the run, from all folders and URLs that it saves to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cadenza.checkpoint.store import Branch, Entry, Store
from cadenza.status.branches import Rank


class Listed(NamedTuple):
    """A checkpoint in a catalogue."""

    store: Store
    entry: Entry

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.entry.saved.name

    @property
    def path(self) -> str:
        """Its path or URL."""
        return f"{self.store.files}/{self.name}"

    @property
    def is_damaged(self) -> bool:
        """Whether its manifest cannot be read, although its write was completed."""
        return self.entry.manifest is None and not self.entry.is_unfinished

    def rank(self, branch: Branch) -> Rank | None:
        """Return its sort key on a branch; None if it belongs to another run. One that is not readable is ordered by step."""
        return branch.rank(self.entry.saved, self.entry.branch or branch)


class Catalogue:
    """The checkpoints of a run.

    Other runs may save to the same folders. A checkpoint that is not readable counts unless its folder has some of other runs.

    Args:
        stores: The folders and URLs that the run saves to.
        branch: The present branch of the run.
    """

    def __init__(self, stores: Iterable[Store], branch: Branch) -> None:
        self.stores: list[Store] = [*stores]
        self.branch: Branch = branch
        self.all: list[Listed] = []
        """The checkpoints on all branches."""
        for store in self.stores:
            entries = store.entries()
            runs = {branch.run} | {entry.branch.run for entry in entries if entry.branch is not None}
            alone = len(runs) == 1
            self.all += [
                Listed(store, entry) for entry in entries if (alone if entry.branch is None else entry.branch.run == branch.run)
            ]

    def line(self) -> list[Listed]:
        """Return the checkpoints on the line of the present branch, newest first."""
        ranked = [(rank, one) for one in self.all if (rank := one.rank(self.branch)) is not None and rank[0]]
        return [one for _, one in sorted(ranked, key=lambda pair: pair[0], reverse=True)]

    @property
    def next_number(self) -> int:
        """The number for a new branch."""
        return 1 + max([self.branch.number, *(one.entry.branch.number for one in self.all if one.entry.branch is not None)])

    def __str__(self) -> str:
        return ", ".join(str(store.files) for store in self.stores)
