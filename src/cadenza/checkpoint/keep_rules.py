"""Keep rules: what ``keep=`` accepts, and which checkpoints each rule keeps. One that no rule keeps is deleted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from cadenza.checkpoint.store import Saved
from cadenza.engine.monitor import Mode, Watched, is_pair, name_of, watched_and_mode
from cadenza.hooks.counters import COUNTERS, check_length
from cadenza.hooks.numbers import at_least
from cadenza.hooks.schedule import At, Composite, Every, First, Last, Schedule
from cadenza.status.branches import Rank
from cadenza.status.progress import Counters
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from fractions import Fraction

    from cadenza.status.progress import Progress

BestOf = str | tuple[str, Mode] | Sequence[str | tuple[str, Mode]]
"""The name of a result and which direction is better, or several. A loss needs no direction."""

KEEP_LAST = 2
"""The number of newest checkpoints that are kept without rules."""

FORMS = (
    'Last(2), Last("6 h"), First(1), First("1 epoch"), Every("1000 steps"), At("3 epochs"), Best("eval/acc", 3, mode="max"), '
    "a function of the checkpoints, or several in a list or joined by |"
)


class JoinedByBar:
    """What ``|`` joins to `Rules`."""

    __slots__ = ()
    is_keep_rule: ClassVar[bool] = True

    def __or__(self, other: Keep) -> Rules:
        return Rules((*parts_of(cast("Keep", self)), *parts_of(other)))

    def __ror__(self, other: Keep) -> Rules:
        return Rules((*parts_of(other), *parts_of(cast("Keep", self))))


class CheckpointRule(JoinedByBar, ABC):
    """A rule of ``keep=`` that is not a schedule."""

    __slots__ = ()

    @abstractmethod
    def keeps(self, line: Sequence[Known]) -> Iterable[Known]:
        """Return the checkpoints to keep, of a line as `Rule` gets it; the same ones after the others are deleted."""


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Best(CheckpointRule):
    """Keep the checkpoints with the best results of an evaluation: a rule for ``Checkpoint(keep=...)``.

    When a result is among the best so far, a checkpoint is written. Of equal results, the earlier is better. A result that is
    not finite is never kept, nor are weights that are not finite. If ``Evaluate(weights="ema")`` found the best result,
    `load_weights` takes the averaged weights of the checkpoint.

    Args:
        monitor: The name of the result, such as ``"eval/acc"``, or a function of the results.
        count: The number of checkpoints to keep.
        mode: ``"max"`` or ``"min"``: which way is better. A loss needs none.

    Raises:
        ValueError: `count` is below 1, or there is no mode.

    >>> from cadenza.hooks import Every, Last
    >>> Last(2) | Best("eval/acc", 3, mode="max") | Every("6 h")
    Last(2) | Best('eval/acc', 3, mode='max') | Every('6 h')
    """

    monitor: Watched
    count: int
    mode: Mode

    def __init__(self, monitor: Watched, count: int = 1, *, mode: Mode | None = None) -> None:
        watched, direction = watched_and_mode(monitor, mode, owner="Best")
        if direction not in ("min", "max"):
            raise ValueError(f"Best: mode must be 'min' or 'max', the direction that is better; got {direction!r}")
        object.__setattr__(self, "monitor", watched)
        object.__setattr__(self, "count", at_least(1, "count", count))
        object.__setattr__(self, "mode", direction)

    @property
    def name(self) -> str:
        """The name of the result, or of the function."""
        return name_of(self.monitor)

    def keeps(self, line: Sequence[Known]) -> list[Known]:
        """Return those with the best results; of equal ones, the earlier. A result that is not finite does not count."""
        sign = -1 if self.mode == "max" else 1
        judged = [saved for saved in _present(line) if self.name in saved.values and saved.finite]
        return sorted(judged, key=lambda saved: sign * saved.values[self.name])[: self.count]

    def would_keep(self, line: Sequence[Known], value: float) -> bool:
        """Return whether a checkpoint with this result would be kept, if it were the newest."""
        kept = [saved.values[self.name] for saved in self.keeps(line)]
        better = len(kept) < self.count or (value > kept[-1] if self.mode == "max" else value < kept[-1])
        return math.isfinite(value) and better

    def __repr__(self) -> str:
        count = "" if self.count == 1 else f", {self.count}"
        return f"Best({brief(self.monitor)}{count}, mode={self.mode!r})"


KeepRule = Schedule | CheckpointRule | Callable[[Sequence["Known"]], Iterable["Known"]]


class Rules(JoinedByBar, tuple[KeepRule, ...]):
    """Several keep rules: what one of them keeps is kept. ``|`` makes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return " | ".join(map(repr, self))


Keep = KeepRule | Sequence[KeepRule]
"""What ``keep=`` accepts: a rule, or several."""


class KeepRules:
    """The rules of one `Checkpoint`. A checkpoint that one of them keeps stays.

    Args:
        keep: The rules; None: those that the other arguments are short for.
        keep_last: The number of newest checkpoints to keep; None keeps all.
        keep_best: The results of which the best checkpoint is kept.
    """

    def __init__(self, keep: Keep | None, keep_last: int | None, keep_best: BestOf) -> None:
        if keep is not None and (keep_best or keep_last != KEEP_LAST):
            raise ValueError(
                "Checkpoint(keep=...) takes all rules, and keep_last= and keep_best= are short for Last(n) and Best(name, "
                f"mode=...); got keep={keep!r}, keep_last={keep_last!r}, keep_best={keep_best!r}. Write all of them in keep=."
            )
        if keep is None and keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last must be a whole number of at least 1, or None to keep all; got {keep_last!r}")
        newest: list[KeepRule] = [] if keep_last is None else [Last(keep_last)]
        given = [*newest, *_bests(keep_best)] if keep is None else parts_of(keep)
        if not given and keep is not None:
            raise ValueError(
                "keep must have at least one rule; got none. Leave it out to keep the newest two, or give keep_last=None to "
                "keep all."
            )
        for rule in given:
            rule_of(rule, None)
        self.keeps_all: bool = keep is None and keep_last is None
        self.given: list[KeepRule] = given
        self.best: list[Best] = [rule for rule in given if isinstance(rule, Best)]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.given)) or "all"

    def rules(self, limits: Progress, accumulate: int) -> list[Kept]:
        """Return the rules in a run with these limits.

        Raises:
            ScheduleError: A rule needs a length of the run or of the epoch, which is not known.
        """
        everything = [Kept("all", list)] if self.keeps_all else []
        return [*everything, *(Kept(brief(rule), rule_of(rule, limits, accumulate)) for rule in self.given)]


def parts_of(keep: Keep) -> list[KeepRule]:
    """Return the single rules in what ``keep=`` accepts."""
    if isinstance(keep, Composite) and keep.operator == "|":
        return list(keep.parts)
    if isinstance(keep, Iterable) and not isinstance(keep, str):
        return [part for rule in keep for part in parts_of(rule)]
    return [keep]


def rule_of(given: KeepRule, limits: Progress | None, accumulate: int = 1) -> Rule:
    """Return what a rule keeps.

    Args:
        given: A value of the user.
        limits: The limits of the run; None only checks the value.
        accumulate: The most batches that a step has.

    Raises:
        TypeError: It is no keep rule.
        ScheduleError: It needs a length of the run or of the epoch, which is not known.
    """
    if isinstance(given, CheckpointRule):
        return given.keeps
    if callable(given) and not isinstance(given, type):
        return lambda line: given(_present(line))
    kinds: dict[type, Callable[[Span, Sequence[Known]], Iterable[Known]]] = {
        Every: _one_per_interval, At: _first_at, First: _oldest_within, Last: _newest_within,
    }  # fmt: skip
    kind = kinds.get(type(given))
    if kind is None or not isinstance(given, Every | First):
        meant = f" Did you mean Every({given!r}) or Last({given!r})?" if isinstance(given, str | int) else ""
        raise TypeError(f"expected a keep rule; got {given!r}. Use one of: {FORMS}.{meant}")
    if given.unit or not isinstance(given, First):
        return partial(kind, _span(given.counting("step"), limits, accumulate))
    count = int(given.count)
    return (lambda line: line[-count:]) if isinstance(given, Last) else (lambda line: _present(line)[:count])


def _span(given: Every | First, limits: Progress | None, accumulate: int) -> Span:
    """Return a length in a unit that checkpoints know; of a part of the run, the number of steps or tokens."""
    if limits is not None:
        check_length(given, given.length, limits)
    if given.unit != "%":
        return Span(given.count, given.unit)
    from fractions import Fraction  # here, as it takes 2 ms to import

    steps = None if limits is None else limits.total("step", accumulate)
    tokens = None if limits is None else limits.total("token")
    whole, unit = (tokens, "token") if steps is None else (steps, "step")
    return Span(given.count * Fraction(whole or 1) / 100, unit)


def _bests(keep_best: BestOf) -> list[Best]:
    """Return the rule of each result."""
    pair = is_pair(keep_best) and all(isinstance(part, str) for part in keep_best) and not keep_best[1].endswith("loss")
    given: Sequence[Any] = [keep_best] if pair or isinstance(keep_best, str) else cast("Sequence[Any]", keep_best)
    for each in given:
        if not (each.endswith("loss") if isinstance(each, str) else is_pair(each)):
            raise ValueError(f'keep_best must be a pair such as ("eval/acc", "max"), or several; got {keep_best!r}')
    return [Best(each) if isinstance(each, str) else Best(each[0], mode=each[1]) for each in given]


# -- the checkpoints of a run ----------------------------------------------------------------------


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

    name: str = field(init=False)
    """The name of its folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.saved.name)

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
    def of(saved: Saved, rank: Rank, facts: Mapping[str, Any], began: float = 0.0, owners: Iterable[str] = ()) -> Known:
        """Return what the facts of a manifest say. A fact of a wrong type counts as missing.

        Args:
            saved: The checkpoint.
            rank: Its rank in the run.
            facts: The facts.
            began: The time at which the run began, for facts that do not say it.
            owners: Callbacks that asked for it after it was written.
        """
        asked = facts.get("asked_by")
        if not isinstance(asked, list):  # version 0.1
            asked = [str(facts["run"]).partition("/")[2] or "Checkpoint"]
        values, averaged = (fact if isinstance(fact := facts.get(name), Mapping) else {} for name in ("values", "averaged"))
        began = _number(facts.get("began", began)) or 0.0
        return Known(
            saved,
            rank,
            {name: fact for name, fact in facts.items() if type(fact) is int},
            began,
            (_number(facts.get("time")) or 0.0) - began,
            {name: number for name, value in values.items() if (number := _number(value)) is not None},
            facts.get("finite") is not False,
            facts["exact"] is True and not facts.get("weights_only"),
            frozenset(map(str, (*asked, *owners))),
            {name: str(value) for name, value in averaged.items()},
        )


def line_of(known: Iterable[Known]) -> list[Known]:
    """Return one checkpoint a step, abandoned ones first, then oldest first.

    Of a step that was saved again, it is the last one at which a run can continue. It has the results and owners of all.
    """
    steps: dict[tuple[int, ...], list[Known]] = {}
    for checkpoint in sorted(known, key=attrgetter("rank")):
        steps.setdefault(checkpoint.rank[:-1], []).append(checkpoint)
    return [_joined(alike) if alike[1:] else alike[0] for alike in steps.values()]


def _joined(alike: Sequence[Known]) -> Known:
    """Return the last checkpoint of a step at which a run can continue, with the results and the owners of all."""
    chosen = max(alike, key=lambda saved: (saved.whole, saved.saved))
    values = {name: value for saved in alike for name, value in saved.values.items()}
    averaged = {name: weights for saved in alike for name, weights in saved.averaged.items()}
    return replace(chosen, values=values, averaged=averaged, owners=frozenset[str]().union(*(saved.owners for saved in alike)))


class Span(NamedTuple):
    """A length in a unit. A time is in seconds."""

    amount: Fraction | int
    unit: str


Rule = Callable[[Sequence[Known]], Iterable[Known]]
"""Returns the checkpoints to keep. The line has one a step, abandoned ones first, then oldest first."""


class Kept(NamedTuple):
    """A rule, and the text that a user knows it by."""

    text: str
    keeps: Rule


def _newest_within(span: Span, line: Sequence[Known]) -> Iterable[Known]:
    """Keep those of the last span before the newest."""
    positions = [(saved.position(span.unit), saved) for saved in _present(line)]
    end = max((position for position, _ in positions), default=0)
    return [saved for position, saved in positions if position > end - span.amount]


def _oldest_within(span: Span, line: Sequence[Known]) -> Iterable[Known]:
    """Keep those of the first span of the run."""
    return [saved for saved in _present(line) if saved.position(span.unit) <= span.amount]


def _first_at(span: Span, line: Sequence[Known]) -> Iterable[Known]:
    """Keep the first that reaches a point of the run."""
    return [saved for saved in _present(line) if saved.position(span.unit) >= span.amount][:1]


def _one_per_interval(span: Span, line: Sequence[Known]) -> Iterable[Known]:
    """Keep the first that reaches each multiple of an interval, counted from the beginning of the run."""
    reached: float = 0
    for saved in _present(line):
        multiples = saved.position(span.unit) // span.amount
        if multiples > reached:
            reached = multiples
            yield saved


def _present(line: Sequence[Known]) -> list[Known]:
    return [saved for saved in line if not saved.abandoned]


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return number if math.isfinite(number) else None
