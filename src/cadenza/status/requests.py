"""The pending requests of a run: to end the run, or the epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from signal import SIGINT
from typing import Any, Literal

from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters

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
        """The request to continue from an earlier checkpoint."""
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
        self.leave: bool = False
        """Whether the epoch is to be left, for any of these."""

    def ask_stop(self, decision: Decision) -> None:
        """Request the end of the run."""
        self.stop, self.leave = self.stop or decision, True

    def ask_back(self, decision: Decision, back: GoBack) -> None:
        """Request to continue from an earlier checkpoint. Every rank must request the same."""
        self.back = back
        self.ask_stop(decision)

    def refuse_saves(self) -> None:
        """Note that the state of this run is broken. Every rank must do so."""
        self.is_broken = True

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
