"""The functions that a moment calls: one for each number of arguments, and one that keeps the time for a profile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cadenza.hooks.listener import Listener
from cadenza.profiling.spans import CLOSES, MARKS, OPENS

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks
    from cadenza.hooks.moments import Moment
    from cadenza.profiling.spans import Watch


class Left(BaseException):  # no error: it unwinds an evaluation
    """A signal ends the run and interrupts an evaluation. It unwinds the hook that evaluates, and the loop catches it.

    Later hooks of the moment are not called now: see `cadenza.engine.suspension`.
    """

    def __init__(self, evaluation: str = "", batches: int = 0) -> None:
        super().__init__(f"{evaluation!r} was left after {batches} batches")
        self.evaluation, self.batches = evaluation, batches
        self.listener: Listener | None = None
        """The hook that evaluates."""
        self.due: list[list[Any]] = []
        """The due hooks after it, if the moment was interrupted before."""


class Scene:
    """What the hooks of one run do in one thread."""

    __slots__ = ("listener", "thread", "unwinding")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.listener: Listener | None = None
        """The listener that is running, the innermost if a hook fires a moment."""
        self.unwinding: BaseException | None = None
        """The error on whose way out moments fire."""


class Calls:
    """The listeners that a moment calls now. The list is replaced, never changed: a moment under way keeps its own."""

    __slots__ = ("listeners",)

    def __init__(self, listeners: list[Listener]) -> None:
        self.listeners = listeners


def fan_out(hooks: Hooks, moment: Moment, calls: Calls, scene: Scene) -> Callable[..., None]:
    """Return a function with the moment's arguments that calls the listeners, in order.

    Arguments are spelled out up to two besides the run: ``*values`` costs 80 ns a listener. Source generated for each moment
    would save 5 ns a moment; that the scene knows the listener costs 25 ns, and 10 ns for each further listener.
    """
    return (_no_value, _one_value, _two_values, _values)[min(values_of(moment), 3)](calls, scene, hooks.failed_in(moment))


@lru_cache(maxsize=256)
def values_of(moment: Moment) -> int:
    """Return how many arguments a moment has besides the run."""
    return len(inspect.signature(moment).parameters) - 2


Failed = Callable[[Listener, BaseException, Any, BaseException | None], tuple[BaseException | None, bool]]
"""Returns the error to raise in the end, if any, and whether the moment is over."""


def _no_value(calls: Calls, scene: Scene, failed: Failed) -> Callable[..., None]:
    def fire(run: Any) -> None:
        first, outer = None, scene.listener
        try:
            for listener in calls.listeners:
                scene.listener, call = listener, listener.call
                try:
                    call(run)
                except BaseException as error:
                    first, over = failed(listener, error, run, first)
                    if over:
                        break
        finally:
            scene.listener = outer
        if first is not None:
            raise first

    return fire


def _one_value(calls: Calls, scene: Scene, failed: Failed) -> Callable[..., None]:
    def fire(run: Any, value: Any) -> None:
        first, outer = None, scene.listener
        try:
            for listener in calls.listeners:
                scene.listener, call = listener, listener.call
                try:
                    call(run, value)
                except BaseException as error:
                    first, over = failed(listener, error, run, first)
                    if over:
                        break
        finally:
            scene.listener = outer
        if first is not None:
            raise first

    return fire


def _two_values(calls: Calls, scene: Scene, failed: Failed) -> Callable[..., None]:
    def fire(run: Any, value: Any, other: Any) -> None:
        first, outer = None, scene.listener
        try:
            for listener in calls.listeners:
                scene.listener, call = listener, listener.call
                try:
                    call(run, value, other)
                except BaseException as error:
                    first, over = failed(listener, error, run, first)
                    if over:
                        break
        finally:
            scene.listener = outer
        if first is not None:
            raise first

    return fire


def _values(calls: Calls, scene: Scene, failed: Failed) -> Callable[..., None]:
    def fire(run: Any, *values: Any) -> None:
        first, outer = None, scene.listener
        try:
            for listener in calls.listeners:
                scene.listener, call = listener, listener.call
                try:
                    call(run, *values)
                except BaseException as error:
                    first, over = failed(listener, error, run, first)
                    if over:
                        break
        finally:
            scene.listener = outer
        if first is not None:
            raise first

    return fire


def watched_fan_out(hooks: Hooks, moment: Moment, calls: Calls, scene: Scene, watch: Watch) -> Callable[..., None]:
    """Return the same with a clock: the time of each call goes to the listener's account, the time between to phases.

    The clock is read at the start and after each call.
    """
    failed, name = hooks.failed_in(moment), moment.__name__
    marks, closes, opens = name in MARKS, name in CLOSES, OPENS.get(name)

    def fire(run: Any, *values: Any) -> None:
        now, interrupted = watch.clock(), watch.current
        if marks and interrupted is watch.gap:
            watch.end_phase(name, now)
        else:
            interrupted.ns += now - watch.since
        watch.since = began = now
        if closes:
            interrupted = watch.close(values[0], interrupted)
        first, outer = None, scene.listener
        try:
            for listener in calls.listeners:
                scene.listener, called, fault = listener, now, None
                watch.current = account = listener.account or watch.account_of(listener)
                call = listener.call
                try:
                    call(run, *values)
                except BaseException as error:
                    fault = error
                now = watch.returned(account, called)
                if fault is not None:
                    first, over = failed(listener, fault, run, first)
                    now = watch.read()
                    if over:
                        break
        finally:
            scene.listener = outer
        watch.current = interrupted
        if calls.listeners and watch.tracing:
            watch.note("moment", name, began, now)
        if marks and interrupted is watch.gap:
            watch.row, watch.gap_began = watch.rows[name], now
        if opens is not None:
            watch.open(opens, values[0], interrupted)
        if first is not None:
            raise first

    return fire
