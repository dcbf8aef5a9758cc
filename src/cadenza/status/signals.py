"""Signals that end a run. Their handlers are installed only during the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

# Windows has fewer signals.
HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
_HANGUP: int | None = getattr(signal, "SIGHUP", None)
_OF_CHILDREN: int | None = getattr(signal, "SIGCHLD", None)

INTERRUPTED = "\nCtrl-C: the run is saved and ends when the step under way is complete. Press Ctrl-C again to end at once."


@runtime_checkable
class WatchesSignals(Protocol):
    """A callback, such as `Checkpoint`, that can end the run at a signal."""

    watch_signals: bool
    """Whether signals end the run."""


def handle_signals(preempt: Callable[[int], None], *, show: bool = True) -> Callable[[], None]:
    """Call `preempt` with the number of the first signal. The earlier handlers receive the second one.

    Outside of the main thread nothing is done, because Python allows handlers only there. A handler for SIGINT that is not
    Python's own is not replaced: the script, or an event loop, handles Ctrl-C. Nor is SIGHUP, if it is ignored, as under nohup.

    A terminal that closes sends SIGHUP more than once, so the others are ignored.

    Args:
        preempt: Called in the signal handler.
        show: Print a line at the first Ctrl-C that says how the run ends.

    Returns:
        A function that restores the earlier handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    owner = os.getpid()
    earlier: dict[int, Any] = {number: signal.getsignal(number) for number in HANDLED}
    of_children = None if _OF_CHILDREN is None else signal.getsignal(_OF_CHILDREN)
    if earlier[signal.SIGINT] is not signal.default_int_handler:
        del earlier[signal.SIGINT]
    if _HANGUP is not None and earlier[_HANGUP] is signal.SIG_IGN:
        del earlier[_HANGUP]
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def restore() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler)

    def receive(number: int, frame: FrameType | None) -> None:
        restore()
        if os.getpid() == owner:
            if number == _HANGUP:
                signal.signal(number, signal.SIG_IGN)
                _write_nowhere(terminals)
            _outlive_workers()
            preempt(number)
            if number == signal.SIGINT and show:
                _show(INTERRUPTED)
        elif number != signal.SIGINT:  # a forked child, such as one of a pool, has no run to end
            os.kill(os.getpid(), number)
        # A terminal also sends Ctrl-C to the children. The run needs them for its last step. A second Ctrl-C ends them.

    def end() -> None:
        restore()
        if _OF_CHILDREN is not None and signal.getsignal(_OF_CHILDREN) is signal.SIG_DFL:
            signal.signal(_OF_CHILDREN, of_children)

    for number in earlier:
        signal.signal(number, receive)
    return end


def end_of_process() -> Any:
    """Return the flag for `spare_this_worker`: its value becomes 1, in shared memory, when this process begins to end.

    At its end, Python sends SIGTERM to each worker that is left, such as a persistent one, once, and then waits for the worker.
    """
    global _end_of_process
    if _end_of_process[0] != os.getpid():
        from multiprocessing.sharedctypes import RawValue  # only runs with workers need them
        from multiprocessing.util import Finalize

        flag = RawValue("b")
        Finalize(None, setattr, (flag, "value", 1), exitpriority=0)  # before the workers get SIGTERM
        _end_of_process = os.getpid(), flag
    return _end_of_process[1]


_end_of_process: tuple[int, Any] = (0, None)  # the process, and its flag: a forked process needs one of its own


def spare_this_worker(parent_ends: Any) -> None:
    """Ignore the first SIGINT and SIGTERM, and SIGHUP, in a worker of a loader. The run gets them too, and reads on from it.

    The worker ends when the process of the run closes it, ends or is gone, or at the second of these signals.

    Args:
        parent_ends: The flag that `end_of_process` returned in the process of the run.
    """
    parent = os.getppid()

    def spare(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if parent_ends.value or os.getppid() != parent:
            os._exit(0)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, spare)
        if _HANGUP is not None:
            signal.signal(_HANGUP, signal.SIG_IGN)


def leaves_by(number: int) -> int | None:
    """Return the status with which the process exits after a run that a signal ended; None: `fit` returns the run.

    In IPython and notebooks, Ctrl-C or "interrupt the kernel" ends the run, but not the session.
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
    """Disable torch's error for a worker that ended: the signal may have ended it, too, in the middle of a step."""
    if _OF_CHILDREN is None:
        return
    if getattr(signal.getsignal(_OF_CHILDREN), "__module__", None) == "torch.utils.data._utils.signal_handling":
        signal.signal(_OF_CHILDREN, signal.SIG_DFL)


def _write_nowhere(terminals: list[int]) -> None:
    """Replace terminals that are gone: output would raise an error before the run is saved."""
    for number in terminals:
        if not os.isatty(number):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), number)


def _show(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # now, and not at the end of a step that may take minutes
    except (RuntimeError, ValueError, OSError):  # the signal came while something was being written there, or it is closed
        return
