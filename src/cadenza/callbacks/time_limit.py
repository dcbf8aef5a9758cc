"""Stop after a given time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Every
from cadenza.hooks.subscription import periodic
from cadenza.status.decisions import RESUMABLE
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from cadenza.run import Run


class TimeLimit(Callback):
    """Stop at the end of the first step after `duration`, counted from the start of this fit.

    The next ``fit(resume="auto")`` continues the run, with a time limit of its own.

    With multiple ranks: uses the time that all ranks agree on before each step, so all stop at the same step; it does not
    communicate.

    Args:
        duration: The time, such as ``"90 s"``, ``"30 min"`` or ``"2 h"``.

    Raises:
        ScheduleError: `duration` cannot be parsed.
        ValueError: `duration` is not a time.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[TimeLimit("0.000001 s")], steps=1000).outcome
    Outcome(kind='stopped', reason='the time limit of 1e-06 s is reached')
    """

    decides: tuple[str, ...] = ("stopped",)

    @renamed(limit="duration")
    def __init__(self, duration: str) -> None:
        schedule = Every(duration)
        if schedule.unit != "s":
            raise ValueError(f'duration must be a time such as "90 s", "30 min" or "2 h"; got {duration!r}')
        self.duration: str = duration
        self._schedule = schedule

    def listeners(self) -> list[Listener]:
        return [periodic(self._schedule, self._stop)]

    def _stop(self, run: Run) -> None:
        run.stop(f"the time limit of {str(self._schedule).removeprefix('every ')} is reached", data={RESUMABLE: True})
