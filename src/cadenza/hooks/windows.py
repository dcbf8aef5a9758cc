"""Timers of windows, such as the first 10 steps, and of composed schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cadenza.hooks.counting import Counting
from cadenza.hooks.function_timers import FunctionTimer
from cadenza.hooks.length import Length
from cadenza.hooks.timers import Timer, after_batches, measure_of
from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from cadenza.run import Run


class Edge:
    """A point of the run. A moment is behind it if it belongs to a later step, epoch, and so on.

    Args:
        length: The point, counted from the start of the run.
        counting: How the moment counts: a moment inside the 11th step is behind 10 steps.
        from_end: Count from the end of the run instead.
    """

    __slots__ = ("_ahead", "_from_end", "_length", "_limit", "_read", "_unit", "times")

    def __init__(self, length: Length, counting: Counting, *, from_end: bool = False) -> None:
        self._length, self._from_end = length, from_end
        self._unit: str = {"%": "step", "epoch": "epoch" if length.whole else "batch"}.get(length.unit, length.unit)
        self._ahead = int(self._unit in counting.under_way)
        self._limit = float(length.count)
        self._read = self._reader()
        self.times: int = 0
        """How often the moment fired in the run, if that is the unit."""

    def measure(self, at: Progress, accumulate: int) -> None:
        """Find where the point is in a run of this length."""
        length, limit = self._length, float(self._length.count)
        if length.unit == "%":
            self._unit, total = measure_of(at, accumulate)
            self._read, limit = Progress.reader(self._unit), float(total * length.count / 100)
        elif length.unit == "epoch" and not length.whole:
            limit = float(length.count * (at.batches_per_whole_epoch or 1))
        self._limit = _total(self._unit, at, accumulate) - limit if self._from_end else limit

    def behind(self, at: Progress) -> bool:
        """Return whether the moment that fires now is behind this point."""
        return self._read(at) + self._ahead > self._limit

    def next_step(self, at: Progress, accumulate: int) -> float:
        """Return how many steps are complete, at the earliest, when a moment is behind this point."""
        if self._limit == math.inf:
            return math.inf
        if self._unit == "step":
            return math.floor(self._limit) + 1 - self._ahead
        if self._unit == "batch":
            return after_batches(math.floor(self._limit) + 1 - self._ahead - self._read(at), at, accumulate)
        if self._unit == "epoch" and at.batches_per_epoch is not None:
            return after_batches((self._limit - at.epoch) * at.batches_per_epoch - at.batch_in_epoch, at, accumulate)
        return 0

    @property
    def counts_times(self) -> bool:
        """Whether it counts how often the moment fired."""
        return self._unit == "time"

    def _reader(self) -> Callable[[Progress], float]:
        unit, ahead = self._unit, self._ahead
        if unit == "epoch":
            self._ahead = 0
            return lambda at: at.epoch + (ahead or at.batch_in_epoch > 0)
        if unit == "s":
            return lambda at: at.elapsed_s
        if unit == "time":
            return lambda _: self.times
        if self._length.unit == "epoch" and not self._from_end:
            return lambda at: at.epoch * (at.batches_per_epoch or 1) + at.batch_in_epoch
        return Progress.reader(unit)  # type: ignore[arg-type]  # it is one of the counters


def _total(unit: Any, at: Progress, accumulate: int) -> float:
    total = at.begun("epoch", accumulate) if unit == "epoch" else at.total(unit, accumulate)
    return math.inf if total is None else total  # `Schedule.check` has refused it


class Window(Timer):
    """Due each time behind one point and not behind another one; `inverted`: each time outside.

    Args:
        after: The start; None for the start of the run.
        until: The end; None for the end of the run.
        inverted: Whether it is due outside.
    """

    __slots__ = ("_after", "_base", "_inverted", "_until")

    seldom = True

    def __init__(self, after: Edge | None, until: Edge | None, *, inverted: bool = False) -> None:
        self._after, self._until, self._inverted = after, until, inverted
        self._base: Counters | None = None

    def due(self, run: Run) -> bool:
        progress = run.progress
        if progress.fractions_from is not self._base:
            self._measure(progress, run.info.accumulate)
        if self.counts_times:
            self.add_times(1)
        return self._inside(progress) is not self._inverted

    def next_step(self, at: Progress, accumulate: int) -> float:
        if at.fractions_from is not self._base:
            self._measure(at, accumulate)
        after, until = self._after, self._until
        begun = after is None or after.behind(at)
        over = until is not None and until.behind(at)
        if self._inverted:
            if not begun or over:
                return 0
            return math.inf if until is None else until.next_step(at, accumulate)
        if over:
            return math.inf
        return 0 if begun or after is None else after.next_step(at, accumulate)

    def next_pulse(self, at: Progress, accumulate: int) -> float:
        return 0 if self.counts_times else math.inf

    def would_be_due(self, at: Progress) -> bool:
        return at.fractions_from is self._base and self._inside(at) is not self._inverted

    @property
    def counts_times(self) -> bool:
        return any(edge is not None and edge.counts_times for edge in (self._after, self._until))

    @property
    def times(self) -> int:
        return max(edge.times for edge in (self._after, self._until) if edge is not None)

    def add_times(self, times: int) -> None:
        for edge in (self._after, self._until):
            if edge is not None:
                edge.times += times

    def _measure(self, at: Progress, accumulate: int) -> None:
        self._base = at.fractions_from
        for edge in (self._after, self._until):
            if edge is not None:
                edge.measure(at, accumulate)

    def _inside(self, at: Progress) -> bool:
        after, until = self._after, self._until
        return (after is None or after.behind(at)) and not (until is not None and until.behind(at))


class NotTimer(Timer):
    """Due each time when another timer is not."""

    __slots__ = ("timer",)

    def __init__(self, timer: Timer) -> None:
        self.timer: Timer = timer

    def due(self, run: Run) -> bool:
        return not self.timer.due(run)

    def next_pulse(self, at: Progress, accumulate: int) -> float:
        return self.timer.next_pulse(at, accumulate)

    def would_be_due(self, at: Progress) -> bool:
        return not self.timer.would_be_due(at)

    def parts(self) -> Iterator[Timer]:
        yield from self.timer.parts()


class Composed(Timer):
    """Due when all of its timers are due, or any of them. Each is asked each time, as its next answer counts from here.

    Functions are asked last, and only if they decide: all ranks have the same answers of the others.
    """

    __slots__ = ("_functions", "_made_due", "_operator", "_timers", "seldom")

    def __init__(self, operator: Literal["&", "|"], timers: Sequence[Timer]) -> None:
        self._operator = operator
        self._functions = [one for one in timers if _is_function(one)]
        self._timers = [one for one in timers if not _is_function(one)]
        self._made_due = False
        self.seldom: bool = (any if operator == "&" else all)(one.seldom for one in timers)

    def due(self, run: Run) -> bool:
        answers = [timer.due(run) for timer in self._timers]
        made_due, self._made_due = self._made_due, False
        if self._operator == "&":
            due = all(answers) and all(timer.due(run) for timer in self._functions)
        else:
            due = any(answers) or any(timer.due(run) for timer in self._functions)
        return due or made_due

    def next_step(self, at: Progress, accumulate: int) -> float:
        following = self._next_answer(at, accumulate)
        # A pulse must be asked when it is due, also if the whole is not: it would be due too late.
        return following if following == math.inf else min(following, self.next_pulse(at, accumulate))

    def _next_answer(self, at: Progress, accumulate: int) -> float:
        steps = [
            one._next_answer(at, accumulate) if isinstance(one, Composed) else one.next_step(at, accumulate)
            for one in (*self._timers, *self._functions)
        ]
        return max(steps) if self._operator == "&" else min(steps)

    def next_pulse(self, at: Progress, accumulate: int) -> float:
        return min(one.next_pulse(at, accumulate) for one in (*self._timers, *self._functions))

    def would_be_due(self, at: Progress) -> bool:
        answers = [timer.would_be_due(at) for timer in (*self._timers, *self._functions)]
        return all(answers) if self._operator == "&" else any(answers)

    def make_due(self, at: Progress) -> None:
        self._made_due = True

    def parts(self) -> Iterator[Timer]:
        for timer in (*self._timers, *self._functions):
            yield from timer.parts()


def _is_function(timer: Timer) -> bool:
    return isinstance(timer.timer if isinstance(timer, NotTimer) else timer, FunctionTimer)
