"""Where the training thread of a run is, read from another thread: nothing is noted while it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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
    ("cadenza.engine.loop", "train_batch"): "compute_loss",
    ("cadenza.engine.updating", "backward"): "the backward pass",
    ("cadenza.engine.updating", "update"): "the update of the weights",
    ("cadenza.engine.session", "settle"): "the step boundary",
    ("cadenza.engine.evaluation", "evaluate"): "an evaluation",
    ("cadenza.engine.prediction", "predict"): "a prediction",
    ("cadenza.engine.loop", "begin"): "the start of the run",
    ("cadenza.loops.fitting", "_begin"): "the start of the run",
}


def whereabouts(session: Session) -> Post:
    """Return where the training thread of a run is now. May be called in any thread."""
    scene = session.hooks.scene
    frame = sys._current_frames().get(scene.thread)
    return Post(session.progress.step, named(frame, scene.listener), _waits(frame))


def named(frame: FrameType | None, listener: Listener | None) -> str:
    """Return the callback and the moment, or the phase, and the innermost line of the user's code.

    Args:
        frame: The innermost frame of a thread.
        listener: The hook that runs in it, if any.
    """
    line = _user_line(frame)
    if listener is not None:
        what = f"`{listener.owner}.{listener.event or listener.moment.__name__}`"
    else:
        what = next((phase for one in _outwards(frame) if (phase := _phase(one))), "the loop")
    return f"{what} ({line})" if line else what


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
        if not file.startswith("<") and not os.path.realpath(file).startswith(_LIBRARIES):
            return f"{os.path.basename(file)}:{one.f_lineno}"
    return ""


def _waits(frame: FrameType | None) -> Waits:
    room = "" if frame is None else frame.f_globals.get("__name__", "")
    if room.startswith(("torch.distributed", "torch.nn.parallel.distributed", "cadenza.drivers.")):
        return Waits.YES
    return Waits.MAYBE if frame is not None and frame.f_code.co_name == "_engine_run_backward" else Waits.NO


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
