"""The handle of a run that trains in a background thread: `Trainer.start`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING

import torch

from cadenza.engine.arguments import check_schedule
from cadenza.engine.session import Session
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment
from cadenza.hooks.order import Phase
from cadenza.loops.foreign_callbacks import base_of
from cadenza.run import Run
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.run import Run

logger: logging.Logger = logging.getLogger("cadenza")

Act = Callable[[Session, str], object]
"""Takes effect at a step boundary, for the author of the decision."""
Answer = Future[None]
_LOOK_S = 0.5  # how often a paused run looks whether it is to end, in seconds


class Handle:
    """A run in a background thread, to watch and to change from a notebook. `Trainer.start` returns it.

    `pause`, `resume`, `step_once`, `attach` and `detach` take effect at the next step boundary, and return then. An interrupt
    (Ctrl-C) ends only this waiting. Each is a decision of the run. They work in one process only: ranks would not agree on the
    step. A hook of the run may call them too; they then return at once.

    The run goes on when a cell is interrupted, and signals do not reach it: after SIGTERM it continues from its newest
    checkpoint. A script must end with `join`, because Python starts no threads or workers when the script is over.

    >>> from cadenza.testing import tiny_trainer
    >>> handle = tiny_trainer(steps=1_000_000).start()
    >>> handle.pause("to look at the loss")
    >>> before = handle.run.progress.step
    >>> handle.step_once()
    >>> handle.run.progress.step - before, handle.paused
    (1, True)
    >>> handle.stop("enough")
    >>> handle.join().outcome
    Outcome(kind='stopped', reason='enough')
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._began, self._ended, self._asking = Event(), Event(), Lock()
        self._asked: SimpleQueue[tuple[Callable[[], object], Answer | None]] = SimpleQueue()
        self._arriving: list[Answer] = []  # of those who wait for the step after which the run is paused again
        self._pauses_at: float = math.inf  # the step boundary at which the run waits
        self._joining = 0

    # -- what it shows -----------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run. Until it has begun, this waits; it raises the error of a run that could not begin."""
        return self._begun().run

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self._ended.is_set()

    @property
    def paused(self) -> bool:
        """Whether the run waits at a step boundary."""
        session = self._session
        return session is not None and session.outcome is None and session.progress.step >= self._pauses_at

    def __repr__(self) -> str:
        reached = "" if self._session is None else f"; {self._session.progress}"
        return f"<Handle: {self._state()}{reached}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the state, and the run."""
        from cadenza.status.markup import element  # imported here: few runs are in a notebook

        state = element("div", element("b", "in the background"), f" · {self._state()}", style="font-size:13px")
        return state if self._session is None else state + self._session.run._repr_html_()

    def _state(self) -> str:
        if self._error is not None:
            return f"failed: {self._error!r}"
        if self._session is None:
            return "starting"
        if (outcome := self._session.outcome) is not None:
            return f"{outcome.kind}: {outcome.reason}" if self.done else "ending"
        return "paused" if self.paused else "training"

    # -- verbs -------------------------------------------------------------------------------------

    def pause(self, reason: str = "") -> None:
        """Wait at the next step boundary until `resume`, `step_once` or `stop`. This time does not count as training.

        Raises:
            RuntimeError: The run is over, or has other ranks.
        """
        self._at_boundary("pause", partial(self._pause, reason or "handle.pause() was called"))

    def resume(self) -> None:
        """Go on with a run that is paused.

        Raises:
            RuntimeError: The run is over, or has other ranks.
        """
        self._at_boundary("resume", partial(self._go_on, "handle.resume() was called"))

    def step_once(self) -> None:
        """Do one step, and pause the run after it; return then.

        Raises:
            RuntimeError: The run is over, or ends before; or it has other ranks.
        """
        done = Answer()
        self._at_boundary("step_once", partial(self._step_once, done))
        if current_thread() is not self._thread:
            done.result()

    def attach(self, callback: BaseCallback) -> None:
        """Call the hooks of a callback from now on, in this run alone.

        It is prepared as at the start of a run: ``on_setup``, ``on_fit_start`` and, inside an epoch, ``on_epoch_start`` are
        called. An error in them is raised here, and the run goes on without the callback. Schedules count from the start of the
        run. Later checkpoints hold its state: add it to the list of a trainer that continues from them.

        Raises:
            CallbackError, OrderError, ScheduleError: It is no native callback, or does not fit this run.
            RuntimeError: The run is over, or has other ranks.
        """
        _check_native(callback, "Give it to Trainer(callbacks=[...]) before the run begins.")
        self._at_boundary("attach", lambda session, who: _attach(session, callback, who=who))

    def detach(self, callback: BaseCallback) -> None:
        """Call the hooks of a callback no more in this run.

        Before, ``on_epoch_end``, inside an epoch, and ``on_fit_end`` are called. An error in them is raised here, and the run
        goes on without the callback.

        Raises:
            CallbackError: It is not in the run; or it writes checkpoints, which end with the run; or it is no native callback.
            RuntimeError: The run is over, or has other ranks.
        """
        _check_native(callback, "Stop the run with handle.stop(...), and begin a new one without it.")
        self._at_boundary("detach", lambda session, who: _detach(session, callback, who=who))

    def stop(self, reason: str) -> None:
        """Request the end of the run at the next step boundary, as `Run.stop` does, also of a paused run. Does not wait."""
        run = self.run
        if not self.done:
            run.stop(reason)
            self._asked.put((lambda: None, None))  # a paused run looks at its requests then

    def join(self, timeout_s: float | None = None) -> Run:
        """Wait until the run is over, and return it; or raise its error. An interrupt (Ctrl-C) ends only this waiting.

        Args:
            timeout_s: How long to wait, in seconds; None: to the end.

        Raises:
            TimeoutError: The run goes on after this time.
            Exception: The error with which the run ended.
        """
        if current_thread() is self._thread:
            raise RuntimeError("handle.join() must not be called in a hook of the run: it would wait for itself.")
        self._joining += 1
        try:
            if not self._ended.wait(timeout_s):
                raise TimeoutError(f"the run goes on after {timeout_s:g} s: {self!r}")
        finally:
            self._joining -= 1
        if self._error is not None:
            raise self._error
        return self.run

    def _at_boundary(self, verb: str, act: Act) -> None:
        """Carry out a verb at the next step boundary, and return then. In a hook of the run, return now."""
        session = self._begun()
        if session.driver.world_size > 1:
            raise RuntimeError(
                f"handle.{verb}(...) works in one process only: other ranks would not do it at the same step. handle.stop(...) "
                "works on multiple ranks."
            )
        here = current_thread() is self._thread
        who, answer = session.hooks.current_owner() if here else None, None if here else Answer()
        with self._asking:
            if self.done:
                raise _over()
            self._asked.put((partial(act, session, who or "the script"), answer))
        session.acts.after_step(self._settle)
        if answer is not None:
            answer.result()

    def _begun(self) -> Session:
        if current_thread() is not self._thread:
            self._began.wait()
        if self._session is None:
            raise self._error or RuntimeError("the run has not begun yet. The verbs of a handle work from on_fit_start on.")
        return self._session

    # -- in the thread of the run ------------------------------------------------------------------

    def train(self, run: Callable[[], object]) -> None:
        """Carry out a run in a new thread."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has its own
        self._thread = Thread(target=self._train, args=(run, device), name="cadenza-run")
        self._thread.start()

    def begin(self, session: Session) -> None:
        """Take the session of the run, which has begun."""
        self._session = session
        self._began.set()

    def _train(self, run: Callable[[], object], device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            run()
        except BaseException as error:  # `join` raises it
            self._error = error
            if not self._joining:
                text = f"the run in the background failed: {error!r}. handle.join() raises the error with its traceback"
                logger.warning(text) if self._session is None else self._session.warn(text)
        finally:
            with self._asking:
                self._ended.set()
            self._began.set()
            while not self._asked.empty():
                _, answer = self._asked.get()
                self._arriving += [] if answer is None else [answer]
            for answer in self._arriving:
                answer.set_exception(_over())

    def _settle(self) -> None:
        """Carry out the verbs at a step boundary, and return when the run is to go on."""
        session = self._begun()
        if session.outcome is not None:
            return
        while not self._asked.empty():
            self._carry_out(*self._asked.get())
        if self.paused:
            with session.progress.aside(), session.hooks.timed("paused"):
                self._wait(session)
        if self._pauses_at != math.inf:
            session.acts.after_next_step(self._settle)

    def _wait(self, session: Session) -> None:
        if self._arriving:
            session.decide("paused", "the step is done", who="the script")
        for answer in self._arriving:
            answer.set_result(None)
        self._arriving.clear()
        while self.paused:
            with suppress(Empty):
                self._carry_out(*self._asked.get(timeout=_LOOK_S))
            if not main_thread().is_alive():
                session.run.stop("the script is over while the run is paused")
            if session.sync.requests.ends_run:
                self._pauses_at = math.inf

    def _carry_out(self, act: Callable[[], object], answer: Answer | None) -> None:
        try:
            act()
        except BaseException as error:
            if answer is None:  # a hook has asked: the error is one of the run
                raise
            answer.set_exception(error)
        else:
            if answer is not None:
                answer.set_result(None)

    def _pause(self, reason: str, session: Session, who: str) -> None:
        if not self.paused:
            session.decide("paused", reason, who=who)
            self._pauses_at = session.progress.step

    def _go_on(self, reason: str, session: Session, who: str) -> None:
        if self.paused:
            session.decide("continued", reason, who=who)
        self._pauses_at = math.inf

    def _step_once(self, done: Answer, session: Session, who: str) -> None:
        self._go_on("for one step", session, who)
        self._pauses_at = session.progress.step + 1
        self._arriving.append(done)


def _over() -> RuntimeError:
    return RuntimeError("the run is over, or has ended before its next step. See handle.run.outcome.")


def _check_native(callback: object, instead: str) -> None:
    if base_of(callback) is not None:
        raise CallbackError(
            f"{brief(callback)} is a callback of another system, which follows a run from its start to its end. {instead}"
        )


# -- callbacks that join and leave a run, at a step boundary, in one process -----------------------


def _attach(session: Session, callback: BaseCallback, *, who: str) -> str:
    """Call the hooks of a callback from now on. Return its name.

    It is prepared as at the start of a run: ``on_setup``, ``on_fit_start`` and, inside an epoch, ``on_epoch_start`` are called.
    Points of its schedules that the run has passed are not due any more. After an error in this, it is detached again.

    Raises:
        CallbackError, OrderError: It is not a callback, or in the run already; or its order contradicts that of the others.
        ScheduleError: One of its schedules does not work with this run.
    """
    run, hooks = session.run, session.hooks
    if any(value is callback for value in hooks.callbacks.values()):
        raise CallbackError(f"{hooks.name_of(callback)} is in the run already. Make a second instance to attach it as well.")
    name = hooks.add(callback)
    try:
        for listener in _listeners(hooks, name):
            if listener.schedule is not None:
                check_schedule(name, listener.schedule, session.progress)
        for moment in (Callback.on_setup, Callback.on_fit_start):
            hooks.call(_listeners(hooks, name, moment), run)
        for listener in _listeners(hooks, name):
            if listener.trigger is not None:  # a schedule counts from the start of the run: what has passed is not due
                listener.trigger.leave_out_the_past(run.progress)
        if session.cursor.in_epoch:
            hooks.call(_listeners(hooks, name, Callback.on_epoch_start), run)
    except BaseException:
        _forget(session, name)
        raise
    session.decide("attached", f"{name} is called from now on", who=who, data={"callback": name})
    return name


def _detach(session: Session, callback: BaseCallback, *, who: str) -> None:
    """Call the hooks of a callback no more.

    What has begun for it ends: ``on_epoch_end`` is called inside an epoch, then ``on_fit_end``, then what it registered with
    `Run.at_end`. ``run.outcome`` is None then.

    Raises:
        CallbackError: It is not in the run; or it writes checkpoints, which end with the run.
    """
    hooks = session.hooks
    name = next((name for name, value in hooks.callbacks.items() if value is callback), None)
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


def _listeners(hooks: Hooks, name: str, moment: Moment | None = None) -> list[Listener]:
    """Return the listeners of a callback, in order: those of one moment, or all."""
    moments = hooks.by_moment if moment is None else [moment]
    return [hook for at in moments for hook in hooks.by_moment.get(at, ()) if hook.owner == name]


def _forget(session: Session, name: str) -> None:
    """Close what a callback opened, and drop its listeners and its evaluations."""
    callback = session.hooks.callbacks[name]
    closers = session.acts.closers
    own = [closer for closer in closers if closer.listener is not None and closer.listener.owner == name]
    closers[:] = [closer for closer in closers if closer not in own]
    try:
        session.hooks.carry_out(reversed(own), session.run)
    finally:
        session.hooks.drop(name)
        for key, evaluation in [*session.run.evaluations.items()]:
            if evaluation is getattr(callback, "evaluation", None):
                del session.run.evaluations[key]
