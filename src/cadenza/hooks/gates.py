"""Functions behind a filter: what is called in place of a callback's own function, and when it may be left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.hooks.cadence import Cadence, Crossing
    from cadenza.run import Run
    from cadenza.status.progress import Counters, Progress

_SELDOM_S = 10.0  # a cadence of the clock for which a second does not count


class Gate:
    """A function behind a filter that sleeps: there is a counter, and a value below which it need not be asked."""

    __slots__ = ("_act", "read", "sleeps_long", "wake")

    def __init__(self, act: Callable[..., object], sleeps_long: bool) -> None:
        self._act, self.sleeps_long = act, sleeps_long
        self.read: Callable[[Progress], float] = never_asked
        self.wake = 0.0

    def __call__(self, run: Run, *rest: Any) -> bool:
        """Call the function if it is due; return whether it was."""
        raise NotImplementedError

    def due(self, at: Progress) -> bool:
        """Return whether the function would be called now."""
        return False

    def let_through(self, at: Progress) -> None:
        """Have the function called the next time, which is now: for a moment that goes on after a resume."""

    def quiet_until(self, at: Progress, pace: float | None) -> float | None:
        """Return the number of steps before which it need not be looked at again; None if that cannot be told.

        Args:
            at: The counters.
            pace: Steps in a second of late; None if not known.
        """
        return self.wake if self.wake == math.inf or self.read is at.reader("step") else None


class UntilGate(Gate):
    """A function that is called in the first steps."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], float], act: Callable[..., object]) -> None:
        super().__init__(act, sleeps_long=True)
        self._end = end

    def __call__(self, run: Run, *rest: Any) -> bool:
        if run.progress.step >= self._end():
            self.wake = math.inf
            return False
        self._act(run, *rest)
        return True


class CrossingGate(Gate):
    """A function behind a crossing: called when its counter has crossed."""

    __slots__ = ("_ahead", "_base", "_behind", "_crossing", "_stride")

    def __init__(self, crossing: Crossing, act: Callable[..., object]) -> None:
        super().__init__(act, crossing.sleeps_long)
        self._crossing, self._behind = crossing, -1
        self._base: Counters | None = None
        self._stride, self._ahead = crossing.stride

    def due(self, at: Progress) -> bool:
        crossing, base = self._crossing, self._crossing.base(at)
        known = self._behind >= 0 and (self._stride > 0 or base is self._base)  # a stride does not depend on the base
        return crossing.passed(at, at) > (self._behind if known else crossing.passed(base, at))

    def let_through(self, at: Progress) -> None:
        self._base, self._behind = self._crossing.base(at), self._crossing.passed(at, at) - 1
        if (asleep := self._crossing.asleep_until(at)) is not None:
            self.read, self.wake = asleep[0], -math.inf

    def __call__(self, run: Run, *rest: Any) -> bool:
        progress = run.progress
        value = self.read(progress)
        if value < self.wake:  # most steps end here
            return False
        if self._stride and self._behind >= 0:  # those that fire in each step end here
            self._behind = int(value + self._ahead) // self._stride
            self.wake = (self._behind + 1) * self._stride - self._ahead
            self._act(run, *rest)
            return True
        crossing = self._crossing
        if (base := crossing.base(progress)) is not self._base:
            self._base, self._behind = base, crossing.passed(base, progress)
        now = crossing.passed(progress, progress)
        crossed = now > self._behind
        self._behind = now
        if (asleep := crossing.asleep_until(progress)) is not None:
            self.read, self.wake = asleep
        if crossed:
            self._act(run, *rest)
        return crossed


class TimedGate(Gate):
    """A function behind a cadence of the clock. It is called only when a step was completed: time goes on in an error, too."""

    __slots__ = ("_due", "_interval_s")

    def __init__(self, cadence: Cadence, act: Callable[..., object]) -> None:
        super().__init__(act, sleeps_long=True)
        self._interval_s = self.wake = float(cadence.interval)
        self.read = _seconds
        self._due = once_a_step(lambda run: True)

    def due(self, at: Progress) -> bool:
        return at.elapsed_s >= self.wake

    def let_through(self, at: Progress) -> None:
        self.wake = 0.0

    def quiet_until(self, at: Progress, pace: float | None) -> float | None:
        # The clock is looked at about once a second; one that is to fire every few seconds is looked at in each step.
        if pace is None or self._interval_s < _SELDOM_S:
            return None
        steps = int(pace * min(1.0, self.wake - at.elapsed_s))
        return at.step + steps if steps > 1 else None

    def __call__(self, run: Run, *rest: Any) -> bool:
        elapsed_s = run.progress.elapsed_s
        if elapsed_s < self.wake or not self._due(run):
            return False
        self.wake = (elapsed_s // self._interval_s + 1) * self._interval_s
        self._act(run, *rest)
        return True


def never_asked(progress: Progress) -> int:
    """Stand for the counter of a gate that was not asked yet."""
    return 0


def _seconds(progress: Progress) -> float:
    return progress.elapsed_s


def once_a_step(due: Callable[[Run], bool]) -> Callable[[Run], bool]:
    """Return `due`, asked only when a step was completed since the last time."""
    last = -1

    def due_after_a_step(run: Run) -> bool:
        nonlocal last
        step = run.progress.step
        if step == (last if last >= 0 else run.progress.origin.step):
            return False
        last = step
        return due(run)

    return due_after_a_step


def nothing(*_: object) -> None:
    """Be what a gate by itself does."""
