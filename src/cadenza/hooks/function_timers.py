"""Timers of functions of the user, and of callbacks that know their last step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cadenza.hooks.timers import Timer
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.run import Run


class FunctionTimer(Timer):
    """Due when a function of the run says so."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Run], bool]) -> None:
        self._function = function

    def due(self, run: Run) -> bool:
        return bool(self._function(run))


class SharedFunctionTimer(FunctionTimer):
    """The same on all ranks, if on one."""

    __slots__ = ()

    def due(self, run: Run) -> bool:
        return run.driver.any_rank(bool(self._function(run)))


class StepTimer(SharedFunctionTimer):
    """The same after each completed step: ranks do not meet in a step that failed."""

    __slots__ = ("_last",)

    def __init__(self, function: Callable[[Run], bool]) -> None:
        super().__init__(function)
        self._last: int | None = None

    def due(self, run: Run) -> bool:
        step = run.progress.step
        if step == (run.progress.origin.step if self._last is None else self._last):
            return False
        self._last = step
        return super().due(run)


class UntilTimer(Timer):
    """Due until so many steps are complete."""

    __slots__ = ("_end",)

    seldom = True

    def __init__(self, end: Callable[[], float]) -> None:
        self._end = end

    def due(self, run: Run) -> bool:
        return run.progress.step < self._end()

    def next_step(self, at: Progress, accumulate: int) -> float:
        return 0 if at.step < self._end() else math.inf
