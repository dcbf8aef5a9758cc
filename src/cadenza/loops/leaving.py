"""How a loop of the user's own is left: with which error, and at the end of the process."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Collection, Generator
from dis import opmap
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from cadenza.errors import LoopError, out_of_generator

_RAISING = {opmap["RERAISE"], opmap["RAISE_VARARGS"]}
_YIELDING = {opmap[name] for name in ("YIELD_VALUE", "SEND", "RESUME", "JUMP_BACKWARD_NO_INTERRUPT") if name in opmap}


def end_with(course: Generator[Any, Any, None], error: BaseException) -> None:
    """End the course of a run with an error of the loop, which is still propagating there.

    Raises:
        BaseException: Another error is the cause, such as that of another rank.
    """
    trace = error.__traceback__
    try:
        course.throw(error)
    except BaseException as raised:
        if out_of_generator(raised) is not error:
            raise
    finally:
        error.__traceback__ = trace


def close_at_exit(opened: Any) -> Callable[[], object]:
    """Call ``opened.close()`` at the end of the process, while all modules are there, if the object exists then.

    Returns:
        A function that withdraws this.
    """
    held = weakref.ref(opened)

    def close() -> None:
        if (left := held()) is not None:
            left.close()

    atexit.register(close)
    return partial(atexit.unregister, close)


def error_leaving(frames: Collection[int]) -> BaseException | None:
    """Return the error that is leaving one of the frames with these ids now; None if none does, as at a ``break``.

    A ``for`` loop tells its iterator only that it is deallocated: call this then. The error has a traceback entry for the
    frame, at the instruction at which the frame is. From Python 3.12 on the error refers to that entry. Before, it does so only
    once it is caught: then the error is the one that nothing refers to; and an error that C code raised is not an object yet,
    so a `LoopError` stands for it.
    """
    objects = gc.get_objects()
    traces = [one for one in objects if type(one) is TracebackType and id(one.tb_frame) in frames and not _is_thrown_in(one)]
    trace = next(filter(_is_current, traces), None) or next(filter(_is_raised_again, traces), None)
    if trace is None:
        return None
    errors: list[BaseException] = [one for one in objects if issubclass(type(one), BaseException)]
    for error in errors:
        if error.__traceback__ is trace:
            return error
    for error in errors:
        if _may_be_at(error, trace) and _is_held_by_none(error, [objects, errors]):
            return error
    return LoopError(f"the loop raised an error at {_where(trace)}")


def _is_current(trace: TracebackType) -> bool:
    return trace.tb_lasti == trace.tb_frame.f_lasti


def _is_thrown_in(trace: TracebackType) -> bool:
    """Return whether the frame is a generator between the steps and the loop, such as a progress bar, that is closed."""
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] in _YIELDING


def _is_raised_again(trace: TracebackType) -> bool:
    """Return whether the frame is at the end of a ``finally`` or ``except`` block, which raises an earlier error again."""
    return trace.tb_frame.f_code.co_code[trace.tb_frame.f_lasti] in _RAISING


def _may_be_at(error: BaseException, trace: TracebackType) -> bool:
    """Return whether what `error` has been through belongs to `trace`: nothing yet, or frames further in."""
    begin = error.__traceback__
    if begin is None:
        return True
    inner = trace.tb_next
    while inner is not None and inner is not begin:
        inner = inner.tb_next
    return inner is begin


def _is_held_by_none(error: BaseException, known: list[Any]) -> bool:
    ours = {id(one) for one in known}
    return all(id(one) in ours or isinstance(one, FrameType) for one in gc.get_referrers(error))


def _where(trace: TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
