"""Keep rules. Each is a value with a pure function over checkpoints; a checkpoint that no rule keeps is deleted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cadenza.checkpoint.store import Entry, Saved
from cadenza.engine.monitor import Mode
from cadenza.hooks.counting import COUNTERS
from cadenza.status.branches import Rank
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What keep rules know of a checkpoint: its manifest, and its rank in the run."""

    saved: Saved
    rank: Rank
    counters: Mapping[str, int] = field(default_factory=dict)
    """epoch, batch, batch_in_epoch, samples, tokens; and batches_per_epoch if it is known."""
    began: float = 0.0
    """The time at which the run began."""
    written_s: float = 0.0
    """The time at which it was written, in seconds since the run began."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The results of evaluations of these weights."""
    finite: bool = True
    whole: bool = True
    """Whether a run can continue there: it is exact, and holds more than weights."""
    owners: frozenset[str] = frozenset()
    """The names of the callbacks that asked for it."""
    averaged: Mapping[str, str] = field(default_factory=dict)
    """The averaged weights that had a result, by the name of the result; the others are of the model's own weights."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.saved.name

    @property
    def abandoned(self) -> bool:
        """Whether the run was rolled back to a point before it."""
        return self.rank[0] == 0

    def position(self, unit: str) -> Fraction | float:
        """Return how far the run had come, in a unit. Time counts from the beginning of the run, pauses included."""
        from fractions import Fraction  # here, as it takes 2 ms to import

        if unit == "s":
            return self.written_s
        if unit == "epoch":
            batches = self.counters.get("batches_per_epoch", 0)
            part = Fraction(self.counters.get("batch_in_epoch", 0), batches) if batches else Fraction(0)
            return self.counters.get("epoch", 0) + part
        known = {name: self.counters.get(name, 0) for name in Counters.__dataclass_fields__} | {"step": self.saved.step}
        return COUNTERS[unit].read(Counters(**known))

    @staticmethod
    def of(entry: Entry, rank: Rank, began: float = 0.0, owners: Iterable[str] = ()) -> Known:
        """Return what the readable manifest of a checkpoint says.

        Args:
            entry: The checkpoint.
            rank: Its rank in the run.
            began: The time at which the run began, for a manifest that does not say it.
            owners: Callbacks that asked for it after it was written.
        """
        manifest = entry.manifest or {}
        asked = manifest.get("asked_by")
        if not isinstance(asked, list):  # version 0.1
            asked = [str(manifest["run"]).partition("/")[2] or "Checkpoint"]
        return Known.of_facts(entry.saved, rank, {"began": began, **manifest, "asked_by": [*asked, *owners]})

    @staticmethod
    def of_facts(saved: Saved, rank: Rank, facts: Mapping[str, Any]) -> Known:
        """Return what the facts of a manifest say. A fact of a wrong type counts as missing."""
        values, averaged = facts.get("values"), facts.get("averaged")
        began = _number(facts.get("began"))
        numbers = {name: float(one) for name, one in values.items() if _is_number(one)} if isinstance(values, Mapping) else {}
        return Known(
            saved,
            rank,
            {name: one for name, one in facts.items() if type(one) is int},
            began,
            _number(facts.get("time")) - began,
            numbers,
            facts.get("finite") is not False,
            facts["exact"] is True and not facts.get("weights_only"),
            frozenset(map(str, facts["asked_by"])),
            {name: str(one) for name, one in averaged.items()} if isinstance(averaged, Mapping) else {},
        )


def line_of(known: Iterable[Known]) -> list[Known]:
    """Return one checkpoint a step, abandoned ones first, then oldest first.

    Of a step that was saved again, it is the last one at which a run can continue. It has the results and owners of all.
    """
    steps: dict[tuple[int, ...], list[Known]] = {}
    for one in sorted(known, key=attrgetter("rank")):
        steps.setdefault(one.rank[:-1], []).append(one)
    return [alike[0] if len(alike) == 1 else _joined(alike) for alike in steps.values()]


class Rule(Protocol):
    """Says which checkpoints to keep."""

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        """Return the checkpoints to keep. `line` has one a step, abandoned ones first, then oldest first."""


class Span(NamedTuple):
    """A length in a unit. A time is in seconds."""

    amount: Fraction | int
    unit: str


@dataclass(frozen=True, slots=True)
class Newest:
    """Keeps the newest `count`. Abandoned ones count as older than all others."""

    count: int

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        return line[-self.count :]


@dataclass(frozen=True, slots=True)
class NewestWithin:
    """Keeps those of the last span before the newest."""

    span: Span

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        present = _present(line)
        return [one for one in present if one.position(self.span.unit) > _end(present, self.span) - self.span.amount]


@dataclass(frozen=True, slots=True)
class Oldest:
    """Keeps the first `count`."""

    count: int

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        return _present(line)[: self.count]


@dataclass(frozen=True, slots=True)
class OldestWithin:
    """Keeps those of the first span of the run."""

    span: Span

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        return [one for one in _present(line) if one.position(self.span.unit) <= self.span.amount]


@dataclass(frozen=True, slots=True)
class OnePerInterval:
    """Keeps the first that reaches each multiple of an interval, counted from the beginning of the run."""

    span: Span

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        reached: float = 0
        for one in _present(line):
            multiples = one.position(self.span.unit) // self.span.amount
            if multiples > reached:
                reached = multiples
                yield one


@dataclass(frozen=True, slots=True)
class FirstAt:
    """Keeps the first that reaches a point of the run."""

    span: Span

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        return [one for one in _present(line) if one.position(self.span.unit) >= self.span.amount][:1]


@dataclass(frozen=True, slots=True)
class Top:
    """Keeps the `count` with the best results; of equal ones, the earlier. Numbers that are not finite are never kept."""

    name: str
    count: int
    mode: Mode

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        sign = -1 if self.mode == "max" else 1
        found = [one for one in _present(line) if self.name in one.values and one.finite]
        return sorted(found, key=lambda one: sign * one.values[self.name])[: self.count]

    def enters(self, line: Sequence[Known], value: float) -> bool:
        """Return whether a checkpoint with this result would be kept, if it were the newest."""
        if not math.isfinite(value):
            return False
        kept = [one.values[self.name] for one in self.keeps(line)]
        return len(kept) < self.count or (value > kept[-1] if self.mode == "max" else value < kept[-1])


@dataclass(frozen=True, slots=True)
class All:
    """Keeps all."""

    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        return line


def _joined(alike: Sequence[Known]) -> Known:
    """Return the last checkpoint of a step at which a run can continue, with the results and the owners of all."""
    chosen = max(alike, key=lambda one: (one.whole, one.saved))
    values = {name: value for one in alike for name, value in one.values.items()}
    averaged = {name: weights for one in alike for name, weights in one.averaged.items()}
    return replace(chosen, values=values, averaged=averaged, owners=frozenset[str]().union(*(one.owners for one in alike)))


def _present(line: Sequence[Known]) -> list[Known]:
    return [one for one in line if not one.abandoned]


def _end(present: Sequence[Known], span: Span) -> Fraction | float:
    return max(one.position(span.unit) for one in present)


def _is_number(one: object) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)


def _number(one: object) -> float:
    return float(one) if isinstance(one, int | float) and math.isfinite(one) else 0.0
