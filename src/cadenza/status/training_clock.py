"""The time of the training alone: what it takes, without the evaluations and the saves in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TrainingClock:
    """Counts seconds, except inside of `paused`.

    >>> clock = TrainingClock()
    >>> with clock.paused():
    ...     before = clock.elapsed_s
    ...     clock.elapsed_s == before
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the clock does not count. Pauses may be nested."""
        if not self._pauses:
            self._paused_at = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused_s += time.perf_counter() - self._paused_at
