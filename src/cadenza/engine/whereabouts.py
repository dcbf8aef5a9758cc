"""Where the training thread of a run is, read from another thread: nothing is noted while it runs."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

import torch

import cadenza
from cadenza.drivers.posts import Post, Waits
from cadenza.engine.session import Session
from cadenza.hooks.listener import Listener

_OURS = os.path.dirname(cadenza.__file__) + os.sep
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), _OURS)
)
_PHASES = {
    ("cadenza.engine.loop", "fetch"): "the training loader",
    ("cadenza.engine.loop", "compute"): "compute_loss",
    ("cadenza.engine.updating", "backward"): "the backward pass",
    ("cadenza.engine.updating", "update"): "the update of the weights",
    ("cadenza.engine.session", "reach_boundary"): "the step boundary",
    ("cadenza.engine.evaluation", "evaluate"): "an evaluation",
    ("cadenza.engine.prediction", "predict"): "a prediction",
    ("cadenza.engine.loop", "begin"): "the start of the run",
    ("cadenza.loops.part", "_set_up"): "the start of the run",
}

_COMMUNICATING = ("torch.distributed", "torch.nn.parallel.distributed", "cadenza.drivers.")


def whereabouts(session: Session) -> Post:
    """Return where the training thread of a run is now. May be called in any thread."""
    scene = session.hooks.scene
    with _no_collection():
        frame = sys._current_frames().get(scene.thread)
        return Post(session.progress.step, named(frame, scene.listener), _waits(frame), _busy_s(scene.thread))


@contextmanager
def _no_collection() -> Iterator[None]:
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


def caller(session: Session) -> tuple[str, str]:
    """Return the running callback and moment, or an empty string; and the same, or the phase, with step and line."""
    listener = session.hooks.here().listener
    where = f"at step {session.progress.step} in {named(sys._getframe(1), listener)}"
    return _hook(listener) if listener is not None else "", where


def named(frame: FrameType | None, listener: Listener | None) -> str:
    """Return the callback and the moment, or the phase, and the innermost line of the user's code.

    Args:
        frame: The innermost frame of a thread.
        listener: The hook that runs in it, if any.
    """
    line = _user_line(frame)
    if listener is not None:
        what = _hook(listener)
    else:
        what = next((phase for one in _outwards(frame) if (phase := _phase(one))), "the loop")
    return f"{what} ({line})" if line else what


def _hook(listener: Listener) -> str:
    return f"`{listener.owner}.{listener.event or listener.moment.__name__}`"


def _busy_s(thread: int) -> float:
    """Return the time that the processor worked for a thread; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _phase(frame: FrameType) -> str | None:
    room = frame.f_globals.get("__name__", "")
    return (
        "the exchange between ranks"
        if room in ("cadenza.engine.rank_sync", "cadenza.engine.shared_sync")
        else _PHASES.get((room, frame.f_code.co_name))
    )


def _user_line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost frame of the user's code; an empty string if the engine runs."""
    for one in _outwards(frame):
        file = one.f_code.co_filename
        if file.startswith(_OURS) and one.f_globals.get("__name__", "").startswith(("cadenza.hooks.", "cadenza.engine.")):
            return ""
        if not _is_library(file):
            return f"{os.path.basename(file)}:{one.f_lineno}"
    return ""


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith("<") or os.path.realpath(file).startswith(_LIBRARIES)


def _waits(frame: FrameType | None) -> Waits:
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        return Waits.MAYBE
    calls = False
    for one in _outwards(frame):
        room = one.f_globals.get("__name__", "")
        if room.startswith(_COMMUNICATING):
            return Waits.MAYBE if calls else Waits.YES
        if room.startswith(("torch._ops", "torch._library")):  # of a sharded tensor, which waits for other ranks or computes
            calls = True
        elif not room.startswith(("threading", "concurrent.futures")):  # a driver may wait for a thread that communicates
            break
    return Waits.NO


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
