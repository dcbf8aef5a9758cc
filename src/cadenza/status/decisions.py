"""The decisions of a run, with author, reason and time: every stop, skip, evaluation and so on; and pending requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from signal import SIGINT
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import nearest
from cadenza.status.formats import in_json
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


RESUMABLE = "resumable"
"""In the data of a stop and the outcome of a run: it ends this start alone, as a signal does, and ``"auto"`` continues."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """The request to end this part of a run, and to continue it from an earlier checkpoint."""

    path: str
    """The path or URL of the checkpoint."""
    recovery: Mapping[str, Any]
    """Plain data for the callback that requests it: they are kept in ``run.json`` with the branch that begins there."""


class Requests:
    """The first request of each kind counts. The loop carries it out at the end of the current step."""

    def __init__(self) -> None:
        self.stop: Decision | None = None
        """The request to end the run."""
        self.back: GoBack | None = None
        """The request to continue from an earlier checkpoint, with `stop`. It is the same on all ranks."""
        self.is_broken: bool = False
        """Whether the loss broke the state of this run, so that it is not saved any more. It is the same on all ranks."""
        self.end_epoch: Decision | None = None
        """The request to end the epoch."""
        self.signal: int | None = None
        """The number of the signal that ends the run; None if there is none."""
        self.signalled: Decision | None = None
        """The stop because of a signal, once it is recorded. `stop` is the request of a hook, which a checkpoint holds."""
        self.signalled_at: float | None = None
        """The time at which this process received the signal, by `time.monotonic`."""
        self.from_signals = False
        """Whether a signal can end the run."""
        self.save: str = ""
        """Why the run is to be saved at a step boundary; empty without a request."""
        self.leave: bool = False
        """Whether the epoch is to be left, for any of the others."""

    def ask_stop(self, decision: Decision) -> None:
        """Request the end of the run."""
        self.stop, self.leave = self.stop or decision, True

    def ask_save(self, reason: str) -> None:
        """Request a save."""
        self.save = "; ".join(dict.fromkeys(filter(None, [self.save, reason or "requested"])))

    def withdraw_stop(self) -> None:
        """Drop the request to end the run, before any rank acts on it."""
        self.stop = None
        self.leave = self.ends_run or self.end_epoch is not None

    def ask_end_epoch(self, decision: Decision) -> None:
        """Request the end of the epoch."""
        self.end_epoch, self.leave = self.end_epoch or decision, True

    def preempt(self, signal: int) -> None:
        """Request the end of the run because of a signal. Safe in a signal handler."""
        self.signal, self.signalled_at, self.leave = signal, time.monotonic(), True

    @property
    def ends_run(self) -> bool:
        """Whether the run is to end."""
        return self.stop is not None or self.signal is not None

    @property
    def is_resumable(self) -> bool:
        """Whether the requested stop ends this start alone."""
        return self.stop is not None and bool(self.stop.data.get(RESUMABLE))

    @property
    def kind(self) -> Literal["stopped", "left", "rolled back", "interrupted", "preempted"]:
        """The kind of the end: as `Outcome.kind`."""
        if self.signal is None:
            return "rolled back" if self.back is not None else "left" if self.stop and self.stop.what == "left" else "stopped"
        return "interrupted" if self.signal == SIGINT else "preempted"

    def drop_epoch(self) -> None:
        """Drop the request to end the epoch: it is carried out, or the epoch has ended."""
        self.end_epoch, self.leave = None, self.ends_run

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It contains no signal and no resumable stop, which concern this process only."""
        asked = {"stop": None if self.is_resumable else self.stop, "end_epoch": self.end_epoch}
        return {name: asdict(decision) for name, decision in asked.items() if decision is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        asked = {name: _decision(saved) for name, saved in state.items()}
        self.stop, self.end_epoch, self.leave = asked.get("stop"), asked.get("end_epoch"), bool(asked)


def _decision(saved: Mapping[str, Any]) -> Decision:
    when = saved["when"] if "when" in saved else saved["at"]  # "at": a checkpoint of version 0.1
    return Decision(saved["what"], saved["who"], saved["why"], Counters(**when), saved.get("data", {}))
