"""Write checkpoints beside the training: one thread, one write in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one task at a time in a thread that outlives no run: `wait` before the end.

    A process may not end while a checkpoint is half written, so the thread is no daemon.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], None]) -> None:
        """Start a task when the one before it is done. `task` deals with its own errors."""
        self.wait()
        self._thread = threading.Thread(target=task, name="cadenza-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
