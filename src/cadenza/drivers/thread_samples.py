"""What the training thread does, read from another thread: whether it waits for other ranks, and the parts of its time."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

_COMMUNICATING = ("torch.distributed", "torch.nn.parallel.distributed", "cadenza.drivers.")
_LOADING, _NO_LOADING = ("torch.utils.data", "cadenza.loading."), "cadenza.loading.evaluation"  # which updates metrics
_DATA, _COMPUTE, _WAIT = range(3)  # as in `stragglers.PARTS`
_EVERY_S, _SPREAD, _GOLDEN = 0.05, 0.5, 0.618034


class Waits(IntEnum):
    """Whether the training thread waits for other ranks."""

    NO = 0
    MAYBE = 1
    """In a backward pass, which computes and communicates."""
    YES = 2


class ThreadSamples:
    """Samples of what the calling thread does, taken by another thread about 20 times a second.

    Args:
        waits_seen: Whether this thread itself waits for other ranks. On a GPU, the kernels of a backward pass wait.
    """

    def __init__(self, *, waits_seen: bool) -> None:
        self.waits_seen: bool = waits_seen
        self.seconds: list[float] = [0.0, 0.0, 0.0]
        """The time in each of `stragglers.PARTS`. The time between two samples counts for the second one."""
        self._thread, self._status = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._last_s, self._taken = time.monotonic(), 0

    def pause_s(self) -> float:
        """Return the time until the next sample. It varies, so that no length of a step is in time with it."""
        return _EVERY_S * (1 - _SPREAD / 2 + _SPREAD * (self._taken * _GOLDEN % 1))

    def take(self) -> None:
        """Take a sample."""
        part, now_s = self._part(), time.monotonic()
        self.seconds[part] += now_s - self._last_s
        self._last_s, self._taken = now_s, self._taken + 1

    def _part(self) -> int:
        with no_collection():
            frame = sys._current_frames().get(self._thread)
            waits = waits_of(frame)
            if waits is Waits.YES or (waits is Waits.MAYBE and self.waits_seen and self._sleeps()):
                return _WAIT
            return _DATA if any(map(_loads, outwards(frame))) else _COMPUTE

    def _sleeps(self) -> bool:
        """Return whether the thread waits in the kernel; False where the system does not show it."""
        try:
            return self._status.read_bytes().rpartition(b")")[2].split()[0] == b"S"
        except (OSError, IndexError):
            return False


def waits_of(frame: FrameType | None) -> Waits:
    """Return whether a thread waits for other ranks, by its innermost frame."""
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        return Waits.MAYBE
    calls = False
    for outward in outwards(frame):
        room = outward.f_globals.get("__name__", "")
        if room.startswith(_COMMUNICATING):
            return Waits.MAYBE if calls else Waits.YES
        if room.startswith(("torch._ops", "torch._library")):  # of a sharded tensor, which waits for other ranks or computes
            calls = True
        elif not room.startswith(("threading", "concurrent.futures")):  # a driver may wait for a thread that communicates
            break
    return Waits.NO


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the innermost one first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _loads(frame: FrameType) -> bool:
    """Return whether a frame takes a batch: of the training, or of any loader."""
    room: str = frame.f_globals.get("__name__", "")
    if room == "cadenza.engine.loop":
        return frame.f_code.co_name == "fetch"
    return room.startswith(_LOADING) and room != _NO_LOADING


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while the frames of another thread are read.

    Python 3.11 collects inside the call that makes the object of a frame. If what it destroys lets the other thread go on, the
    frame may be gone when the call continues, and the process crashes. From Python 3.12 on, nothing is collected there.
    """
    off = sys.version_info < (3, 12) and gc.isenabled()
    if off:
        gc.disable()
    try:
        yield
    finally:
        if off:
            gc.enable()
