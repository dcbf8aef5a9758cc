"""The functions that call the listeners of a moment: one for each number of arguments, and one that measures a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from heapq import heappop, heappush
from threading import get_ident
from typing import TYPE_CHECKING, Any

from cadenza.hooks.counters import COUNTERS
from cadenza.hooks.listener import Listener, Trigger
from cadenza.profiling.spans import BOUNDARIES, CLOSES, OPENS

if TYPE_CHECKING:
    from cadenza.profiling.spans import Profiler
    from cadenza.run import Run


class DispatchState:
    """The state of the dispatch of a run, in the thread that trains it.

    Args:
        of: The scene of the run, if this one is that of another thread, which fires a moment of the run.
    """

    __slots__ = ("listener", "of", "thread", "unwinding")

    def __init__(self, of: DispatchState | None = None) -> None:
        self.of: DispatchState | None = of
        self.thread: int = get_ident()
        self.listener: Listener | None = None
        """The running listener; the innermost one if a hook fires a moment."""
        self.unwinding: BaseException | None = None
        """The error that is being raised while moments fire; None if there is none."""


ACTING: ContextVar[DispatchState | None] = ContextVar("ACTING", default=None)
"""The scene in a thread that fires a moment and does not train the run: threads that a hook starts may use it, too."""


class Calls:
    """What a moment calls.

    Args:
        every: All listeners of the moment, in order.
    """

    __slots__ = ("_always", "_asked", "_listening", "every", "has_schedules", "listeners", "until")

    def __init__(self, every: Sequence[Listener]) -> None:
        self.every: list[Listener] = list(every)
        self.listeners: list[Listener] = self.every
        """Those that it calls now. The list is replaced, never changed, so a moment under way keeps its list."""
        self._always: list[int] = []  # the indices of those that it always calls: a `When` asks its function in the call
        self._listening: dict[Trigger, list[int]] = {}  # the indices of those that it calls when a trigger is due
        for index, listener in enumerate(self.every):
            trigger = listener.trigger
            own = self._always if trigger is None or trigger.functions else self._listening.setdefault(trigger, [])
            own.append(index)
        self.has_schedules: bool = bool(self._listening)
        self.invalidate()

    def invalidate(self) -> None:
        """Ask all schedules at the next firing."""
        steps: list[tuple[float, int, Trigger]] = [(0, index, trigger) for trigger, (index, *_) in self._listening.items()]
        self._asked: dict[str, list[tuple[float, int, Trigger]]] = {"step": steps}
        """For each counter a heap of triggers, by the value from which on they must be asked."""
        self.until: float = 0 if steps else math.inf
        """The number of complete steps from which on `select` must be called."""

    def select(self, run: Run) -> None:
        """Take the listeners that are due at the firing that begins."""
        asked, due, at = [], [], run.progress
        for counter, waiting in self._asked.items():
            reached = COUNTERS[counter].read(at)
            while waiting and waiting[0][0] <= reached:
                asked.append(heappop(waiting))
        if not asked and len(self.listeners) == len(self._always):
            return
        for _, index, trigger in asked:
            if trigger.due(run):
                due += self._listening[trigger]
            counter, value = trigger.asked_from
            heappush(self._asked.setdefault(counter, []), (value, index, trigger))
        self.listeners = [self.every[index] for index in sorted(self._always + due)]
        others = due or any(waiting for counter, waiting in self._asked.items() if counter != "step")
        self.until = 0 if others else self._asked["step"][0][0]


Failed = Callable[[Listener, BaseException, Any, BaseException | None], tuple[BaseException | None, bool]]
"""Handles an error of a listener. Returns the error to raise at the end, if any, and whether to stop calling listeners."""


def fan_out(
    moment: Callable[..., None], calls: Calls, scene: DispatchState, failed: Failed, profiler: Profiler | None = None
) -> Callable[..., None]:
    """Return a function with the moment's arguments that calls the listeners, in order.

    With a profiler, the time of each call goes to the span of its listener. The clock is read at the start and after each call.

    Setting ``scene.listener`` costs 25 ns for the first listener and 10 ns for each further one. The calls are written out,
    because ``call(*arguments)`` costs 25 ns more than ``call(run)``, for each listener.
    """

    def fire(run: Any, value: Any = _ABSENT, other: Any = _ABSENT, *others: Any) -> None:
        first, outer = None, scene.listener
        if profiler is not None:
            interrupted, began = profiler.current, profiler.read()
        try:
            for listener in calls.listeners:
                scene.listener, call = listener, listener.call
                if profiler is not None:
                    profiler.current, called = listener.span or profiler.span_of(listener), profiler.since
                try:
                    if value is _ABSENT:
                        call(run)
                    elif other is _ABSENT:
                        call(run, value)
                    else:
                        call(run, value, other, *others) if others else call(run, value, other)
                except BaseException as error:
                    first, over = failed(listener, error, run, first)
                    if over:
                        break
                finally:
                    if profiler is not None:
                        profiler.count_call(called)
            if first is not None:
                raise first
        finally:
            scene.listener = outer
            if profiler is not None:
                profiler.current = interrupted
                if profiler.tracing and calls.listeners:
                    profiler.add_event("moment", moment.__name__, began, profiler.since)
            del first  # its traceback holds this frame, and the frame the run

    return scheduled(fire, calls) if calls.has_schedules else fire


_ABSENT: Any = object()


def scheduled(fire: Callable[..., None], calls: Calls) -> Callable[..., None]:
    """Return a function that takes the listeners that are due, then fires the moment."""

    def select_and_fire(run: Run, *values: Any) -> None:
        if run.progress.step >= calls.until:
            calls.select(run)
        if calls.listeners:
            fire(run, *values)

    return select_and_fire


def profiled_fan_out(
    profiler: Profiler, moment: Callable[..., None], calls: Calls, scene: DispatchState, failed: Failed
) -> Callable[..., None]:
    """Return the same with a profiler. The time between moments goes to phases."""
    name, fire = moment.__name__, fan_out(moment, calls, scene, failed, profiler)
    if name in BOUNDARIES:
        return _between_phases(fire, name, calls, profiler)
    return _with_evaluation(fire, name, profiler) if name in OPENS or name in CLOSES else fire


def _between_phases(fire: Callable[..., None], name: str, calls: Calls, profiler: Profiler) -> Callable[..., None]:
    """Return a function that ends a phase, calls `fire` if there are listeners, and starts the next phase.

    A moment that fires inside a hook, or inside a phase, ends none.
    """
    index, row, gap, loop = BOUNDARIES[name], profiler.rows[name], profiler.gap, profiler.loop

    def boundary(run: Any, *values: Any) -> None:
        if profiler.current is not gap:
            fire(run, *values)
            return
        now, phase = profiler.clock(), profiler.row[index]
        phase.ns += gap.ns + now - profiler.since
        phase.calls += 1
        profiler.since, gap.ns = now, 0
        if profiler.tracing and phase is not loop:
            profiler.add_event("phase", phase.name, profiler.gap_began, now)
        profiler.row, profiler.gap_began = row, now
        if calls.listeners or calls.has_schedules:
            try:
                fire(run, *values)
            finally:
                profiler.gap_began = profiler.since

    return boundary


def _with_evaluation(fire: Callable[..., None], name: str, profiler: Profiler) -> Callable[..., None]:
    """Return a function that calls `fire`, and starts or ends the span of an evaluation."""

    def start(run: Any, evaluation: object) -> None:
        try:
            fire(run, evaluation)
        finally:
            profiler.open(OPENS[name], evaluation, profiler.current)

    def end(run: Any, evaluation: object) -> None:
        profiler.read()
        profiler.current = profiler.close(evaluation, profiler.current)
        fire(run, evaluation)

    return start if name in OPENS else end
