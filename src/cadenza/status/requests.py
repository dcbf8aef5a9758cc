"""What was asked of a run and is not taken yet: its end, or that of the epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from signal import SIGINT
from typing import Any, Literal

from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters


class Requests:
    """The first request of each kind counts; the loop takes it at the end of the step under way."""

    def __init__(self) -> None:
        self.stop: Decision | None = None
        """That the run shall end."""
        self.end_epoch: Decision | None = None
        """That the epoch shall end."""
        self.signal: int | None = None
        """The signal that asked for the end, if one did."""
        self.signalled: Decision | None = None
        """The stop that the signal asked for, once it is noted; `stop` is that of a hook, which a checkpoint holds."""
        self.signalled_at: float | None = None
        """The time at which this process received the signal, by `time.monotonic`."""
        self.from_signals = False
        """Whether a signal can ask for the end of the run."""
        self.suspended: dict[str, Any] | None = None
        """The interrupted moment, in a run that is being saved or that continues there."""
        self.leave = False
        """Whether the epoch is to be left, for any of these."""

    def ask_stop(self, decision: Decision) -> None:
        """Ask for the end of the run."""
        self.stop, self.leave = self.stop or decision, True

    def ask_end_epoch(self, decision: Decision) -> None:
        """Ask for the end of the epoch."""
        self.end_epoch, self.leave = self.end_epoch or decision, True

    def preempt(self, signal: int) -> None:
        """Ask for the end of the run because of a signal. Safe in a signal handler."""
        self.signal, self.signalled_at, self.leave = signal, time.monotonic(), True

    @property
    def ends_run(self) -> bool:
        """Whether the run is to end."""
        return self.stop is not None or self.signal is not None

    @property
    def kind(self) -> Literal["stopped", "interrupted", "preempted"]:
        """The kind of the end: by a callback, by Ctrl-C, or by another signal."""
        if self.signal is None:
            return "stopped"
        return "interrupted" if self.signal == SIGINT else "preempted"

    def drop_epoch(self) -> None:
        """Forget that the end of the epoch was asked for: it is taken, or has nothing left to end."""
        self.end_epoch, self.leave = None, self.ends_run

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold. A signal is for this process alone, and no part of it."""
        asked = {"stop": self.stop, "end_epoch": self.end_epoch}
        return {name: asdict(decision) for name, decision in asked.items() if decision is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        asked = {name: _decision(saved) for name, saved in state.items()}
        self.stop, self.end_epoch, self.leave = asked.get("stop"), asked.get("end_epoch"), bool(asked)


def _decision(saved: Mapping[str, Any]) -> Decision:
    when = saved["when"] if "when" in saved else saved["at"]  # "at": a checkpoint of version 0.1
    return Decision(saved["what"], saved["who"], saved["why"], Counters(**when), saved.get("data", {}))
