"""Retry failed writes, during the training and at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

from cadenza.checkpoint.store.shards import Gather

PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts during the training. The last one repeats."""
LAST_PAUSES_S: tuple[float, ...] = (0.1, 0.4, 1.0)
"""Pauses between attempts at the end of a run."""
_SLICE_S = 0.25


class Retries:
    """Repeats an attempt in a thread, with growing pauses, until it succeeds or is stopped.

    Args:
        gather: Returns the values of all ranks, if several ranks write together. Then each rank must start and stop, and
            all ranks make the same number of attempts.
    """

    def __init__(self, gather: Gather | None = None) -> None:
        self._gather = gather
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, attempt: Callable[[], bool]) -> None:
        """Repeat `attempt` until it returns true. It must handle its own errors."""
        self._stopped.clear()
        # No daemon: the process must not end while a checkpoint is half written.
        self._thread = threading.Thread(target=self._repeat, args=(attempt,), name="cadenza-retry", daemon=False)
        self._thread.start()

    def stop(self) -> None:
        """Make no further attempt; wait for the running one."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self, attempt: Callable[[], bool]) -> None:
        """Make the last attempts in the calling thread."""
        for pause_s in LAST_PAUSES_S:
            time.sleep(pause_s)
            if attempt():
                return

    def _repeat(self, attempt: Callable[[], bool]) -> None:
        for pause_s in _pauses_s():
            if self._stopped_within(pause_s) or attempt():
                return

    def _stopped_within(self, pause_s: float) -> bool:
        """Wait; return whether this or another rank was stopped meanwhile."""
        if self._gather is None:
            return self._stopped.wait(pause_s)
        deadline = time.monotonic() + pause_s
        while True:
            stopped = self._stopped.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            try:
                everyone = self._gather((stopped, time.monotonic() >= deadline))
            except RuntimeError:  # another rank is gone, and nothing can be written together
                return True
            if any(stopped for stopped, _ in everyone):
                return True
            if all(over for _, over in everyone):
                return False


def _pauses_s() -> Iterator[float]:
    return chain(PAUSES_S, repeat(PAUSES_S[-1]))
