"""What was decided in a run: every stop, skip, evaluation, disabled callback - what, who, why, when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cadenza.errors import nearest
from cadenza.status.progress import Counters


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision."""

    what: str
    """In the past tense: stopped, epoch ended, batch skipped, evaluated, disabled, never fired."""

    who: str
    why: str
    at: Counters

    def __str__(self) -> str:
        return f"{self.what} by {self.who} at {self.at}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        at = asdict(self.at)
        return {"what": self.what, "who": self.who, "why": self.why, **at}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    kind: Literal["finished", "stopped", "interrupted", "preempted", "failed"]
    reason: str


def why(what: str, decisions: Sequence[Decision]) -> str:
    """Return in a sentence why something was decided last; that it was not, if it was not."""
    for decision in reversed(decisions):
        if decision.what == what or decision.who == what:
            return str(decision)
    known = sorted({decision.what for decision in decisions})
    return f"nothing was {what!r} in this run.{nearest(what, known)} Decided were: {', '.join(known) or 'nothing'}"
