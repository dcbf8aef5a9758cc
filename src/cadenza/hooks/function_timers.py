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
        return self._answer(run)

    def _answer(self, run: Run) -> bool:
        return super().due(run)


class StepEndTimer(StepTimer):
    """At the end of steps: a rank waits for the others only if the function is true on it.

    It is due at this step if the function is true on all ranks, and at the next one if it is true on some. At the last step of
    an epoch and of the run, all ranks wait, and it is due if the function is true on one.
    """

    __slots__ = ("_arrives", "_late")

    def __init__(self, function: Callable[[Run], bool]) -> None:
        super().__init__(function)
        self._arrives: Callable[[], int] | None = None
        """Waits for the number of ranks on which the function was true at the last step; set only if it was false here."""
        self._late = False

    def make_due(self, at: Progress) -> None:
        self._late = True

    def waits(self, at: Progress, accumulate: int) -> bool:
        return self._is_late()

    def _answer(self, run: Run) -> bool:
        late, self._late = self._is_late(), False
        own, driver = bool(self._function(run)), run.driver
        if driver.world_size == 1:
            return late or own
        if _may_be_last(run.progress):
            return late or driver.any_rank(own)
        arrives = driver.count_later(own)
        if own:
            everywhere = arrives() == driver.world_size
            self._late = not everywhere
            return late or everywhere
        # After an error, other ranks may never begin this exchange.
        self._arrives = lambda: 0 if run.outcome is not None and run.outcome.kind == "failed" else arrives()
        return late

    def _is_late(self) -> bool:
        """Return whether the function was true on some ranks at the last step: the same on all ranks."""
        arrives, self._arrives = self._arrives, None
        if arrives is not None:
            self._late = arrives() > 0
        return self._late


def _may_be_last(at: Progress) -> bool:
    """Return whether this step may be the last of its epoch or of the run: the same on all ranks."""
    unknown = at.batches_per_epoch is None and at.max_epochs is not None
    return unknown or at.finished or at.batch_in_epoch == at.batches_per_epoch


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
