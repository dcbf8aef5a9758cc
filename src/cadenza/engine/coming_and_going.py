"""Callbacks that come into a run under way, and that leave it: at a step boundary, in one process."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from cadenza.engine.arguments import check_schedule
from cadenza.engine.session import Session
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment
from cadenza.hooks.order import Phase
from cadenza.status.shown import brief

if TYPE_CHECKING:
    from cadenza.run import Run


def attach(session: Session, callback: BaseCallback, *, who: str) -> str:
    """Call the hooks of a callback from now on. Return its name.

    It is prepared as at the start of a run: ``on_setup``, ``on_fit_start`` and, inside an epoch, ``on_epoch_start`` are called.
    Points of its schedules that the run has passed are not due any more. After an error in this, it is detached again.

    Raises:
        CallbackError, OrderError: It is not a callback, or in the run already; or its order contradicts that of the others.
        ScheduleError: One of its schedules does not work with this run.
    """
    run, hooks = session.run, session.hooks
    if any(one is callback for one in hooks.callbacks.values()):
        raise CallbackError(f"{hooks.name_of(callback)} is in the run already. Make a second instance to attach it as well.")
    name = hooks.add(callback)
    try:
        for listener in _listeners(hooks, name):
            if listener.schedule is not None:
                check_schedule(name, listener.schedule, session.progress)
        for moment in (Callback.on_setup, Callback.on_fit_start):
            hooks.call(_listeners(hooks, name, moment), run)
        for listener in _listeners(hooks, name):
            _leave_out_the_past(listener, run)
        if session.cursor.in_epoch:
            hooks.call(_listeners(hooks, name, Callback.on_epoch_start), run)
    except BaseException:
        _forget(session, name)
        raise
    session.decide("attached", f"{name} is called from now on", who=who, data={"callback": name})
    return name


def detach(session: Session, callback: BaseCallback, *, who: str) -> str:
    """Call the hooks of a callback no more. Return its name.

    What has begun for it ends: ``on_epoch_end`` is called inside an epoch, then ``on_fit_end``, then what it registered with
    `Run.at_end`. ``run.outcome`` is None then.

    Raises:
        CallbackError: It is not in the run; or it writes checkpoints, which end with the run.
    """
    hooks = session.hooks
    name = next((name for name, one in hooks.callbacks.items() if one is callback), None)
    if name is None:
        raise CallbackError(f"{brief(callback)} is not in this run. Its callbacks are {', '.join(hooks.callbacks) or 'none'}.")
    if callback.phase is Phase.SAVE:
        raise CallbackError(
            f"{name} writes the checkpoints of the run, also the last one, and cannot be detached. Stop the run with "
            "handle.stop(...), and begin a new one without it."
        )
    try:
        for listener in _listeners(hooks, name):
            if listener.trigger is not None:  # other callbacks with an equal schedule are not asked for now
                listener.follow(copy(listener.trigger))
        if session.cursor.in_epoch:
            hooks.call(_listeners(hooks, name, Callback.on_epoch_end), session.run)
        hooks.call(_listeners(hooks, name, Callback.on_fit_end), session.run)
    finally:
        _forget(session, name)
    session.decide("detached", f"{name} is called no more", who=who, data={"callback": name})
    return name


def _listeners(hooks: Hooks, name: str, moment: Moment | None = None) -> list[Listener]:
    """Return the listeners of a callback, in order: those of one moment, or all."""
    moments = hooks.by_moment if moment is None else [moment]
    return [one for at in moments for one in hooks.by_moment.get(at, ()) if one.owner == name]


def _leave_out_the_past(listener: Listener, run: Run) -> None:
    """Have the points that the run has passed not be due: a schedule counts from the start of the run."""
    if listener.trigger is not None:
        listener.trigger.leave_out_the_past(run.progress)


def _forget(session: Session, name: str) -> None:
    """Close what a callback opened, and drop its listeners and its evaluations."""
    callback = session.hooks.callbacks[name]
    own = [one for one in session.closers if one.listener is not None and one.listener.owner == name]
    session.closers = [one for one in session.closers if one not in own]
    try:
        session.hooks.carry_out(reversed(own), session.run)
    finally:
        session.hooks.drop(name)
        for key, evaluation in [*session.evaluations.items()]:
            if evaluation is getattr(callback, "evaluation", None):
                del session.evaluations[key]
