"""A callback that records the moments of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment, moments_of
from cadenza.run import Run
from cadenza.status.progress import Counters


@dataclass(frozen=True, slots=True)
class Seen:
    """One firing of a moment, and the counters then: an element of `Recorder.seen`.

    >>> from cadenza.testing import tiny_run
    >>> recorder = Recorder(Callback.on_step_end)
    >>> run = tiny_run(callbacks=[recorder], batches=2)
    >>> [(seen.moment, seen.at.step) for seen in recorder.seen]
    [('on_step_end', 1), ('on_step_end', 2)]
    """

    moment: str
    """The name of the moment."""
    at: Counters
    """The counters when it fired."""


class Recorder(Callback):
    """Records the moments that it receives.

    Args:
        only: The moments to record, such as ``Callback.on_step_end``; all moments if there is none.

    >>> from cadenza.testing import tiny_run
    >>> recorder = Recorder(Callback.on_step_end, Callback.on_epoch_end)
    >>> run = tiny_run(callbacks=[recorder], batches=2)
    >>> recorder.names
    ['on_step_end', 'on_step_end', 'on_epoch_end']
    """

    def __init__(self, *only: Moment) -> None:
        self.seen: list[Seen] = []
        self._only = only or tuple(moments_of(type(self)).values())

    def listeners(self) -> list[Listener]:
        return [Listener(moment, self._recording(moment)) for moment in self._only]

    def _recording(self, moment: Moment) -> Callable[..., None]:
        def record(run: Run, *_: Any) -> None:
            self.seen.append(Seen(moment.__name__, run.progress.now()))

        return record

    @property
    def names(self) -> list[str]:
        """The recorded moments, in order."""
        return [seen.moment for seen in self.seen]

    def diagram(self) -> str:
        """Return the tree of the recorded moments: each where it came first, with its count."""
        lines: dict[str, str] = {}
        depth = 0
        for name in self.names:
            depth -= name.endswith("_end")
            lines.setdefault(name, "  " * depth + name)
            depth += name.endswith("_start")
        times = Counter(self.names)
        return "\n".join(f"{line:<36}{times[name]:>3}" for name, line in lines.items())
