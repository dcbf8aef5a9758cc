"""Signals that ask for the end of a run, while it goes on and no longer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

HEARD = (signal.SIGTERM, signal.SIGUSR1)


def signals_heard(preempt: Callable[[int], None]) -> Callable[[], None]:
    """Call `preempt` with the number of the first signal that comes; a second one does what it did before, at once.

    Nothing is done outside of the main thread: Python allows handlers there alone.

    Returns:
        A function that puts the former handlers back.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    owner = os.getpid()
    former = {number: signal.getsignal(number) for number in HEARD}

    def put_back() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def hear(number: int, frame: FrameType | None) -> None:
        put_back()
        if os.getpid() == owner:
            preempt(number)
        else:  # a forked child, of a pool say, has no run to end: it ends as ever
            os.kill(os.getpid(), number)

    for number in HEARD:
        signal.signal(number, hear)
    return put_back
