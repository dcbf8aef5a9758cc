"""Wait for another thread or process. The limit is for one that hangs: it is far above what a loaded machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], timeout_s: float = 200.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
