"""The rules of `Alert`: conditions on records, written as texts or functions."""

from __future__ import annotations

import inspect
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cadenza.hooks.schedule import Every
from cadenza.status.formats import counted
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.records.history import History
    from cadenza.records.record import Record

Function = Callable[..., str | None]
FORMS = (
    '"train/loss > 10", "eval/acc < 0.5 for 3 records", "eval/loss rises 3 times", "eval/acc falls", "non-finite", '
    '"train/loss non-finite", "no record for 10 min", "no eval/loss for 2 h", or a function of a record that returns a text or '
    "None"
)


class Rule(ABC):
    """A condition on records. `look` returns a text when it begins to hold: not again until it has stopped holding."""

    name: str | None = None
    """The watched name; None if the rule covers all names."""
    silence_s: float | None = None
    """Seconds without a record of `name` after which the rule holds; None for rules on values."""

    def __init__(self, source: object) -> None:
        self.source: object = source
        self.reset()

    def __repr__(self) -> str:
        return repr(self.source) if isinstance(self.source, str) else brief(self.source)

    def __str__(self) -> str:
        return self.source if isinstance(self.source, str) else brief(self.source)

    def reset(self) -> None:
        """Reset the state for a new run."""
        self.holds: bool = False

    def look(self, record: Record, history: History) -> str | None:
        """Return a text if the condition begins to hold with this record."""
        if self.name is not None and self.name not in record.values:
            return None
        text, before = self.check(record, history), self.holds
        self.holds = text is not None
        return None if before else text

    @abstractmethod
    def check(self, record: Record, history: History) -> str | None:
        """Return a text if the condition holds at this record, which has a value of `name`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values."""
        return {name: value for name, value in vars(self).items() if name in ("holds", "count", "last")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])


class Comparison(Rule):
    """A value is above or below a limit, in some records in a row."""

    SIGNS: ClassVar[dict[str, Callable[[float, float], bool]]] = {
        ">": operator.gt,
        "<": operator.lt,
        ">=": operator.ge,
        "<=": operator.le,
    }

    def __init__(self, source: str, name: str, sign: str, limit: float, times: int) -> None:
        self.sign: str = sign
        self.limit: float = limit
        self.times: int = times
        super().__init__(source)
        self.name: str | None = name

    def reset(self) -> None:
        super().reset()
        self.count: int = 0

    def check(self, record: Record, history: History) -> str | None:
        value = record.values[self.name or ""]
        self.count = self.count + 1 if self.SIGNS[self.sign](value, self.limit) else 0
        if self.count < self.times:
            return None
        lasting = f" in {counted(self.times, 'record')}" if self.times > 1 else ""
        return f"{self.name} is {value:.6g}, {self.sign} {self.limit:g}{lasting}"


class Trend(Rule):
    """A value rises or falls in `count` consecutive records. NaN is skipped."""

    def __init__(self, source: str, name: str, way: str, times: int) -> None:
        self.way: str = way
        self.times: int = times
        super().__init__(source)
        self.name: str | None = name

    def reset(self) -> None:
        super().reset()
        self.count: int = 0
        self.last: float | None = None

    def check(self, record: Record, history: History) -> str | None:
        value, last = record.values[self.name or ""], self.last
        if not math.isnan(value):
            self.last = value
            moved = last is not None and (value > last if self.way == "rises" else value < last)
            self.count = self.count + 1 if moved else 0
        if self.count < self.times:
            return None
        often = f" {counted(self.times, 'time')}" if self.times > 1 else ""
        past = "rose" if self.way == "rises" else "fell"
        return f"{self.name} {past}{often}, to {value:.6g}"


class NonFinite(Rule):
    """A value is NaN or infinite."""

    def __init__(self, source: str, name: str | None) -> None:
        super().__init__(source)
        self.name: str | None = name

    def check(self, record: Record, history: History) -> str | None:
        names = record.values if self.name is None else [self.name]
        wrong = [f"{name} is {record.values[name]}" for name in names if not math.isfinite(record.values[name])]
        return ", ".join(wrong) or None


class Silence(Rule):
    """No record, or no record with a value of `name`, has arrived for some time. A thread checks this; see `Alert`."""

    def __init__(self, source: str, name: str | None, silence_s: float, shown: str) -> None:
        super().__init__(source)
        self.name: str | None = name
        self.silence_s: float | None = silence_s
        self.shown: str = shown

    def check(self, record: Record, history: History) -> str | None:
        return None

    def text(self, last_step: int) -> str:
        """Return the text of the alert. `last_step` is the step of the last record; 0 before the first."""
        return f"no {self.name or 'record'} for {self.shown}, the last one was of step {last_step}"


class Own(Rule):
    """A function of a record, or of a record and the history. It returns a string while its condition holds."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        try:
            wanted = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
        except (TypeError, ValueError):  # a function of C code
            wanted = []
        if len(wanted) > 2:
            many = counted(len(wanted), "argument")
            raise TypeError(f"the rule {brief(function)} must take a record, or a record and the history; it takes {many}")
        self._with_history = len(wanted) == 2
        self._function = function

    def check(self, record: Record, history: History) -> str | None:
        text = self._function(record, history) if self._with_history else self._function(record)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the rule {brief(self._function)} must return a text or None; it returned {text!r}")
        return text or None


_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARES = re.compile(rf"(\S+)\s*(>=|<=|>|<)\s*({_NUMBER})(?:\s+for\s+(\d+)\s+records?)?")
_MOVES = re.compile(r"(\S+)\s+(rises|falls)(?:\s+(\d+)\s+times?)?")
_NOT_FINITE = re.compile(r"(?:(\S+)\s+)?non-finite")
_SILENT = re.compile(r"no\s+(\S+)\s+for\s+(.+)")


def parse_rule(rule: object) -> Rule:
    """Read a rule of `Alert`.

    Raises:
        TypeError: It is neither a string nor a function.
        ValueError: The string has none of the known forms. The message lists them.

    >>> parse_rule("eval/acc < 0.5 for 3 records").limit
    0.5
    >>> parse_rule("eval/loss goes up")
    Traceback (most recent call last):
        ...
    ValueError: the rule 'eval/loss goes up' cannot be read. Use one of: "train/loss > 10", "eval/acc < 0.5 for 3 records", \
"eval/loss rises 3 times", "eval/acc falls", "non-finite", "train/loss non-finite", "no record for 10 min", \
"no eval/loss for 2 h", or a function of a record that returns a text or None
    """
    if callable(rule):
        return Own(rule)
    if not isinstance(rule, str):
        raise TypeError(f"a rule must be a text or a function; got {rule!r}. Use one of: {FORMS}")
    text = rule.strip()
    if match := _COMPARES.fullmatch(text):
        name, sign, limit, times = match.groups()
        return Comparison(rule, name, sign, float(limit), _times(rule, times))
    if match := _MOVES.fullmatch(text):
        name, way, times = match.groups()
        return Trend(rule, name, way, _times(rule, times))
    if match := _NOT_FINITE.fullmatch(text):
        return NonFinite(rule, match[1])
    if match := _SILENT.fullmatch(text):
        length = Every(match[2])
        if length.unit != "s":
            raise ValueError(f'the rule {rule!r} needs a time such as "90 s", "10 min" or "2 h"; got {match[2]!r}')
        name = None if match[1] in ("record", "records") else match[1]
        return Silence(rule, name, float(length.count), match[2].strip())
    raise ValueError(f"the rule {rule!r} cannot be read. Use one of: {FORMS}")


def _times(rule: str, times: str | None) -> int:
    count = 1 if times is None else int(times)
    if count < 1:
        raise ValueError(f"the rule {rule!r} needs a number of at least 1; got {times}")
    return count
