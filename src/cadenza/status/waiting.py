"""What did not happen in a run, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.status.decisions import Decision


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
