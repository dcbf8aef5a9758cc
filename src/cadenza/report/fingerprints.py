"""The fingerprints of a run, ``fingerprints.jsonl``: checksums by step, and the first step at which two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.records.reading import read_rows
from cadenza.status.formats import counted

FILE = "fingerprints.jsonl"
KINDS = {
    "batch": "the batch {}",
    "outputs": "{}",
    "gradients": "the gradient of {!r}",
    "buffers": "the buffer {!r}",
    "weights": "the weight {!r}",
}
"""The checksummed parts of a row, in the order in which a step computes them, with the name that messages use."""

Row = dict[str, Any]


def read_fingerprints(path: Path, *, broken: list[int] | None = None) -> dict[int, Row]:
    """Return the rows of a ``fingerprints.jsonl`` by step, in order; empty if there is no file.

    Args:
        path: The file.
        broken: The numbers of unreadable lines are appended to it, except an incomplete last line: it is still being written,
            or the run was killed.
    """
    return dict(sorted({row["step"]: row for row in read_rows(path, _checked, broken=broken)}.items()))


def _checked(row: Any) -> Row:
    whole = type(row["step"]) is int and type(row["ranks"]) is int and type(row["shards"]) is bool
    if not whole or not all(isinstance(row[kind], dict) for kind in KINDS):
        raise ValueError("no fingerprint")
    return dict(row)


@dataclass(frozen=True)
class FirstDifference:
    """The comparison of two runs' fingerprints."""

    equal: int
    """The number of steps with equal fingerprints before the first difference."""
    step: int | None
    """The first step with a difference; None if there is none."""
    kind: str
    """The first differing part of that step, one of `KINDS`; empty if nothing differs."""
    name: str
    """Its name, such as that of a weight."""
    only: tuple[Sequence[int], Sequence[int]]
    """The steps that have a fingerprint only in the first and only in the second run."""
    only_in: str
    """``"first"`` or ``"second"`` if only that run has it; empty if both have it."""
    layouts: tuple[str, str]
    """The ranks of both runs, such as ``2 ranks, sharded``."""

    @property
    def comparable(self) -> bool:
        """Whether the checksums cover the same tensors. False if the shards differ."""
        return self.layouts[0] == self.layouts[1] or not any("sharded" in layout for layout in self.layouts)

    def __str__(self) -> str:
        first, second = self.layouts
        notes = "" if first == second else f" ({first} and {second})"
        if not self.comparable:
            return f"not comparable: the weights are in other shards{notes}"
        if self.step is None:
            text = f"{counted(self.equal, 'step')} equal" if self.equal else "no step in common"
        else:
            name = KINDS[self.kind].format(self.name).strip()
            owner = f", which only the {self.only_in} has" if self.only_in else ""
            text = f"the runs part at step {self.step:,}: {name}{owner}; {counted(self.equal, 'step')} before it equal"
            if first != second:
                notes += ". Other numbers of ranks add gradients in another order, so the last bits may differ"
        for which, steps in zip(("first", "second"), self.only, strict=True):
            if steps:
                text += f"; only the {which} has {_listed(steps)}"
        return text + notes


def _listed(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"{counted(len(steps), 'step')} from {steps[0]:,} to {steps[-1]:,}"


def first_difference(first: Mapping[int, Row], second: Mapping[int, Row]) -> FirstDifference | None:
    """Compare the fingerprints of two runs step by step; None if a run has none.

    >>> row = {"step": 1, "ranks": 1, "shards": False, "batch": {}, "outputs": {}, "gradients": {"w": "0a"}, "buffers": {},
    ...        "weights": {"w": "0b"}}
    >>> print(first_difference({1: row}, {1: row | {"weights": {"w": "0c"}}, 2: row}))
    the runs part at step 1: the weight 'w'; 0 steps before it equal; only the second has step 2
    >>> print(first_difference({1: row}, {1: row | {"buffers": {"b": "0d"}}}))
    the runs part at step 1: the buffer 'b', which only the second has; 0 steps before it equal
    """
    if not first or not second:
        return None
    common = [step for step in first if step in second]
    layouts = _layout(first), _layout(second)
    only = [step for step in first if step not in second], [step for step in second if step not in first]
    for equal, step in enumerate(common):
        found = next(_differences(first[step], second[step]), None)
        if found is not None:
            kind, name = found
            present = name in first[step][kind], name in second[step][kind]
            only_in = "" if all(present) else "first" if present[0] else "second"
            return FirstDifference(equal, step, kind, name, only, only_in, layouts)
    return FirstDifference(len(common), None, "", "", only, "", layouts)


def _layout(rows: Mapping[int, Row]) -> str:
    found = dict.fromkeys(f"{counted(row['ranks'], 'rank')}{', sharded' if row['shards'] else ''}" for row in rows.values())
    return " then ".join(found)


def _differences(first: Row, second: Row) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        mine, theirs = first[kind], second[kind]
        names = list(dict.fromkeys([*mine, *theirs]))
        # The backward pass begins with the last ones.
        yield from (
            (kind, name) for name in (names[::-1] if kind == "gradients" else names) if mine.get(name) != theirs.get(name)
        )
