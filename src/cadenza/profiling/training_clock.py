"""The time of the training alone: what it takes, without the evaluations and the saves in between."""

from __future__ import annotations

import time


class TrainingClock:
    """Counts seconds, except while it is paused. Pauses may be nested.

    >>> clock = TrainingClock()
    >>> clock.pause()
    >>> before = clock.elapsed_s
    >>> clock.elapsed_s == before
    True
    """

    __slots__ = ("_began", "_paused_at", "_paused_s", "_pauses")

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._paused_s = self._paused_at = 0.0
        self._pauses = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made, without pauses."""
        now = self._paused_at if self._pauses else time.perf_counter()
        return now - self._began - self._paused_s

    @property
    def paused_s(self) -> float:
        """Seconds of all pauses, and of the present one so far."""
        return self._paused_s + (time.perf_counter() - self._paused_at if self._pauses else 0.0)

    def pause(self) -> None:
        """Stop counting, until `resume` was called as often."""
        if not self._pauses:
            self._paused_at = time.perf_counter()
        self._pauses += 1

    def resume(self) -> None:
        """Count again. Does nothing if the clock is not paused."""
        if self._pauses == 1:
            self._paused_s += time.perf_counter() - self._paused_at
        self._pauses = max(0, self._pauses - 1)
