"""What ``keep=`` accepts: schedules and `Best`, read as keep rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cadenza.checkpoint.rules import (
    All,
    FirstAt,
    Newest,
    NewestWithin,
    Oldest,
    OldestWithin,
    OnePerInterval,
    Rule,
    Span,
    Top,
)
from cadenza.engine.monitor import Mode, Watched, is_pair, name_of, watched_and_mode
from cadenza.hooks.length import check_length
from cadenza.hooks.numbers import at_least
from cadenza.hooks.schedule import At, Composite, Every, First, Last, Schedule
from cadenza.status.shown import brief

if TYPE_CHECKING:
    from cadenza.status.progress import Progress

Pair = tuple[str, Mode]
"""The name of a result, and which direction is better."""

KEEP_LAST = 2
"""The number of newest checkpoints that are kept without rules."""

FORMS = (
    'Last(2), Last("6 h"), First(1), First("1 epoch"), Every("1000 steps"), At("3 epochs"), Best("eval/acc", 3, mode="max"), '
    "or several in a list or joined by |"
)


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Best:
    """Keep the checkpoints with the best results of an evaluation: a rule for ``Checkpoint(keep=...)``.

    When a result is among the best so far, a checkpoint is written. Of equal results, the earlier is better. A result that is
    not finite is never kept, nor are weights that are not finite. If ``Evaluate(weights="ema")`` found the best result,
    `load_weights` takes the averaged weights of the checkpoint.

    Args:
        monitor: The name of the result, such as ``"eval/acc"``, or a function of the results.
        count: The number of checkpoints to keep.
        mode: ``"max"`` or ``"min"``: which way is better.

    Raises:
        ValueError: `count` is below 1, or there is no mode.

    >>> from cadenza.hooks import Every, Last
    >>> Last(2) | Best("eval/acc", 3, mode="max") | Every("6 h")
    Last(2) | Best('eval/acc', 3, mode='max') | Every('6 h')
    """

    monitor: Watched
    count: int
    mode: Mode
    is_keep_rule: ClassVar[bool] = True

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

    def __or__(self, other: Keep) -> Rules:
        return Rules((self, *parts_of(other)))

    def __ror__(self, other: Keep) -> Rules:
        return Rules((*parts_of(other), self))

    def __repr__(self) -> str:
        count = "" if self.count == 1 else f", {self.count}"
        return f"Best({brief(self.monitor)}{count}, mode={self.mode!r})"


KeepRule = Schedule | Best


class Rules(tuple[KeepRule, ...]):
    """Several keep rules: what one of them keeps is kept. ``|`` makes it."""

    __slots__ = ()
    is_keep_rule: ClassVar[bool] = True

    def __or__(self, other: Keep) -> Rules:
        return Rules((*self, *parts_of(other)))

    def __ror__(self, other: Keep) -> Rules:
        return Rules((*parts_of(other), *self))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self))


Keep = KeepRule | Sequence[KeepRule]
"""What ``keep=`` accepts: a rule, or several."""


class Kept(NamedTuple):
    """A rule, and the text that a user knows it by."""

    text: str
    rule: Rule


class KeepRules:
    """The rules of one `Checkpoint`. A checkpoint that one of them keeps stays.

    Args:
        keep: The rules; None: those that the other arguments are short for.
        keep_last: The number of newest checkpoints to keep; None keeps all.
        keep_best: The results of which the best checkpoint is kept.
    """

    def __init__(self, keep: Keep | None, keep_last: int | None, keep_best: Pair | Sequence[Pair]) -> None:
        if keep is not None and (keep_best or keep_last != KEEP_LAST):
            raise ValueError(
                "Checkpoint(keep=...) takes all rules, and keep_last= and keep_best= are short for Last(n) and Best(name, "
                f"mode=...); got keep={keep!r}, keep_last={keep_last!r}, keep_best={keep_best!r}. Write all of them in keep=."
            )
        if keep is None and keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last must be a whole number of at least 1, or None to keep all; got {keep_last!r}")
        newest: list[KeepRule] = [] if keep_last is None else [Last(keep_last)]
        given = [*newest, *(Best(name, mode=mode) for name, mode in _pairs(keep_best))] if keep is None else parts_of(keep)
        if not given and keep is not None:
            raise ValueError(
                "keep must have at least one rule; got none. Leave it out to keep the newest two, or give keep_last=None to "
                "keep all."
            )
        for rule in given:
            rule_of(rule, None)
        self.keeps_all: bool = keep is None and keep_last is None
        self.given: list[KeepRule] = given
        self.best: list[Best] = [one for one in given if isinstance(one, Best)]

    def rules(self, limits: Progress, accumulate: int) -> list[Kept]:
        """Return the rules in a run with these limits.

        Raises:
            ScheduleError: A rule needs a length of the run or of the epoch, which is not known.
        """
        everything = [Kept("all", All())] if self.keeps_all else []
        return [*everything, *(Kept(repr(one), rule_of(one, limits, accumulate)) for one in self.given)]


def parts_of(keep: Keep) -> list[KeepRule]:
    """Return the single rules in what ``keep=`` accepts."""
    if isinstance(keep, Composite) and keep.operator == "|":
        return list(keep.parts)
    if isinstance(keep, Iterable) and not isinstance(keep, str):
        return [part for one in keep for part in parts_of(one)]
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
    if isinstance(given, Best):
        return Top(given.name, given.count, given.mode)
    kinds: dict[type, Callable[[Span], Rule]] = {
        Every: OnePerInterval, At: FirstAt, First: OldestWithin, Last: NewestWithin,
    }  # fmt: skip
    kind = kinds.get(type(given))
    if kind is None or not isinstance(given, Every | First):
        meant = f" Did you mean Every({given!r}) or Last({given!r})?" if isinstance(given, str | int) else ""
        raise TypeError(f"expected a keep rule; got {given!r}. Use one of: {FORMS}.{meant}")
    if not given.unit and isinstance(given, First):
        return (Newest if isinstance(given, Last) else Oldest)(int(given.count))
    return kind(_span(given.counting("step"), limits, accumulate))


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


def _pairs(keep_best: Pair | Sequence[Pair]) -> list[Pair]:
    """Return one or several pairs as a list."""
    given: Sequence[Any] = [keep_best] if keep_best and isinstance(keep_best[0], str) else keep_best
    for pair in given:
        if not is_pair(pair):
            raise ValueError(f'keep_best must be a pair such as ("eval/acc", "max"), or several; got {keep_best!r}')
    return list(given)
