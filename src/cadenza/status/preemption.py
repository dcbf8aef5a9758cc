"""Signals that ask for the end of a run, while it goes on and no longer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

# Windows has fewer signals.
HEARD = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
_OF_CHILDREN: int | None = getattr(signal, "SIGCHLD", None)

INTERRUPTED = "\nCtrl-C: the run is saved and ends when the step under way is complete. Press Ctrl-C again to end at once."


@runtime_checkable
class WatchesSignals(Protocol):
    """A callback, such as `Checkpoint`, that can end the run at a signal."""

    watch_signals: bool
    """Whether it does."""


def signals_heard(preempt: Callable[[int], None], *, show: bool = True) -> Callable[[], None]:
    """Call `preempt` with the number of the first signal that comes; a second one does what it did before, at once.

    Nothing is done outside of the main thread: Python allows handlers there alone. A handler for SIGINT that is not
    Python's own stays: the script, or an event loop, deals with Ctrl-C itself.

    Args:
        preempt: Called in the signal handler.
        show: Tell the user, at the first Ctrl-C, what happens now and what a second one does.

    Returns:
        A function that puts the former handlers back.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    owner = os.getpid()
    former: dict[int, Any] = {number: signal.getsignal(number) for number in HEARD}
    of_children = None if _OF_CHILDREN is None else signal.getsignal(_OF_CHILDREN)
    if former[signal.SIGINT] is not signal.default_int_handler:
        del former[signal.SIGINT]

    def put_back() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def hear(number: int, frame: FrameType | None) -> None:
        put_back()
        if os.getpid() == owner:
            _outlive_workers()
            preempt(number)
            if number == signal.SIGINT and show:
                _show(INTERRUPTED)
        elif number != signal.SIGINT:  # a forked child, of a pool say, has no run to end: it ends as ever
            os.kill(os.getpid(), number)
        # A terminal sends Ctrl-C to the children too. The run still needs them for its last step, and a second one ends them.

    def end() -> None:
        put_back()
        if _OF_CHILDREN is not None and signal.getsignal(_OF_CHILDREN) is signal.SIG_DFL:
            signal.signal(_OF_CHILDREN, of_children)

    for number in former:
        signal.signal(number, hear)
    return end


def spare_this_worker() -> None:
    """Let a worker of a loader outlive the first SIGINT and SIGTERM: they are sent to it and to the run, which still reads it.

    It ends when the run's process closes it or is gone, and at the second of these signals.
    """
    parent = os.getppid()

    def spare(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() != parent:
            os._exit(0)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, spare)


def leaves_by(number: int) -> int | None:
    """Return the status with which the process exits after a run that a signal ended; None: `fit` returns the run.

    In IPython and in notebooks Ctrl-C, or "interrupt the kernel", ends the run and not the session.
    """
    return None if number == signal.SIGINT and _is_interactive() else 128 + number


def exit_after_signal(number: int | None) -> None:
    """Raise SystemExit after a run that a signal ended, with the status of `leaves_by`."""
    if number is not None and (status := leaves_by(number)) is not None:
        raise SystemExit(status)


def _is_interactive() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _outlive_workers() -> None:
    """Do not let torch raise, in the middle of a step, that a loader's worker ended: the signal may have ended it as well."""
    if _OF_CHILDREN is None:
        return
    if getattr(signal.getsignal(_OF_CHILDREN), "__module__", None) == "torch.utils.data._utils.signal_handling":
        signal.signal(_OF_CHILDREN, signal.SIG_DFL)


def _show(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # now, and not at the end of a step that may take minutes
    except (RuntimeError, ValueError, OSError):  # the signal came while something was being written there, or it is closed
        return
