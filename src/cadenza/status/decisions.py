"""The decisions of a run: every stop, skip, evaluation and disabled callback, with author, reason and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import nearest
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.run import Run


# -- why nothing was decided -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The answer of `Run.why_not`. Its text has a sentence for each reason.

    >>> print(WhyNot("saved", ("Checkpoint is due at step 20",)))
    not 'saved' yet: Checkpoint is due at step 20
    """

    what: str
    """The decision, callback, moment or name in question."""
    reasons: tuple[str, ...] = ()
    """What it waits for, or why it cannot happen, in sentences for people."""
    last: Decision | None = None
    """The last time that it did happen; None if it never did."""

    @property
    def happened(self) -> bool:
        """Whether it did happen in this run."""
        return self.last is not None

    def __str__(self) -> str:
        reasons = "; ".join(self.reasons) or "nothing waits for it"
        begin = f"not {self.what!r} yet" if self.last is None else f"{self.last}. Not again since"
        return f"{begin}: {reasons}"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a run: an element of ``run.decisions``.

    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[on(Callback.on_step_end, at=2)(lambda run: run.stop("enough"))])
    >>> [(one.what, one.why, one.when.step) for one in run.decisions]
    [('stopped', 'enough', 2)]
    """

    what: str
    """In the past tense: stopped, epoch ended, batch skipped, evaluated, disabled, never fired."""

    who: str
    """The name of the callback, or of the part of Cadenza, that decided."""
    why: str
    """The reason, for people."""
    when: Counters
    """The counters at the time of the decision."""
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Plain values for code to read, as JSON can hold them. The sentence in `why` is for people."""

    def __repr__(self) -> str:
        return f"<Decision: {self}>"

    def __str__(self) -> str:
        return f"{self.what} by {self.who} at {self.when}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: one line of ``decisions.jsonl``."""
        data = {"data": in_json(self.data)} if self.data else {}
        return {"what": self.what, "who": self.who, "why": self.why, **asdict(self.when), **data}


def in_json(value: Any) -> Any:
    """Return plain values for strict JSON: a number that is not finite becomes text, as in ``metrics.jsonl``."""
    if isinstance(value, Mapping):
        return {name: in_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(steps=2).outcome.kind
    'finished'
    """

    kind: Literal["finished", "stopped", "left", "rolled back", "interrupted", "preempted", "failed"]
    """A limit is reached; ``run.stop`` was called; a loop of your own was left, and did not say why; the run continues from an
    earlier checkpoint, see `Recover`; Ctrl-C; a signal such as SIGTERM; an error."""
    reason: str
    """The reason, in a sentence."""


COMPLETE = ("finished", "stopped", "left")
"""The kinds of outcomes of runs that neither an error nor a signal ended."""


def decide(run: Run, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision:
    """Record a decision of a callback in ``run.decisions``.

    Args:
        run: The run.
        what: The decision in the past tense, such as ``"saved"``.
        why: The reason, for people.
        who: The author; None: the callback that is called now.
        data: Plain values for code to read.
    """
    return run._session.decide(what, why, who=who, data=data)


def why(what: str, decisions: Sequence[Decision]) -> str:
    """Return a sentence with the last decision of a kind, or of an author; or that there is none."""
    for decision in reversed(decisions):
        if decision.what == what or decision.who == what:
            return str(decision)
    known = sorted({decision.what for decision in decisions})
    return f"nothing was {what!r} in this run.{nearest(what, known)} Decided were: {', '.join(known) or 'nothing'}"
