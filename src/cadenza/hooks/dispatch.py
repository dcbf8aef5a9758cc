"""The dispatch: it selects the listeners that a moment calls, and handles their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import proxy

from cadenza.errors import CadenzaError, CallbackError, MonitorError, add_note, notes_of
from cadenza.hooks.counters import counting_of
from cadenza.hooks.fan_out import ACTING, Calls, DispatchState, Failed, fan_out, profiled_fan_out
from cadenza.hooks.listener import Listener, Trigger, restore, state_of
from cadenza.hooks.moments import BaseCallback, Callback, Moment, checked_arguments, moments_of
from cadenza.hooks.order import arranged, name_beside, names_of
from cadenza.hooks.schedule import Schedule, has_function
from cadenza.profiling.spans import TIMED_MOMENTS, Profiler, Timings
from cadenza.status.progress import Counters, Progress
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.run import Run


def hooks_of(run: Run) -> Hooks:
    """Return the dispatch of a run, which holds its callbacks by name."""
    return run._session.hooks


def unwinding(run: Run) -> BaseException | None:
    """Return the error that is being raised while a moment fires; None if there is none."""
    return run._session.hooks.unwinding


# -- errors in hooks, and functions that callbacks register for later ------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a hook that disabled its callback, or in a sink that is tried again. The run continued.

    ``run.faults`` lists it.

    >>> from cadenza import Callback
    >>> from cadenza.testing import tiny_run
    >>> class Broken(Callback):
    ...     on_fault = "disable"
    ...     def on_step_end(self, run):
    ...         raise OSError("the disk is full")
    >>> [fault] = tiny_run(callbacks=[Broken()]).faults
    >>> fault.callback, fault.moment, fault.at.step, fault.error
    ('Broken', 'on_step_end', 1, OSError('the disk is full'))
    """

    callback: str
    """The name of the callback in the run."""
    moment: str
    """The name of the moment, such as ``on_step_end``."""
    error: Exception
    """The error. Its traceback is in the warning and in ``console.log``: frames would keep the model in memory."""
    at: Counters
    """The counters at the time of the error."""
    retried: bool = False
    """Whether it is a sink that is tried again. Otherwise the callback is disabled."""

    def __str__(self) -> str:
        effect = "is tried again" if self.retried else "is disabled"
        return f"{self.callback} failed in {self.moment} at {self.at} and {effect}: {self.error!r}"


@dataclass(frozen=True, slots=True)
class Closer:
    """A function that a hook registered for the next step boundary, or for the end of the run."""

    listener: Listener | None
    """The hook that registered it; None: the run itself."""
    close: Callable[[], object]

    def __call__(self) -> None:
        self.close()


# -- the dispatch ----------------------------------------------------------------------------------


class Hooks(Callback):
    """All callbacks of a run as one callback. A call of one of its hooks calls all listeners of that moment, in order.

    Editors and type checkers therefore know ``hooks.on_step_end(run)`` without a second list of moments. The hook of a moment
    without listeners is the empty method of `Callback`.

    Args:
        callbacks: The callbacks. They are sorted by their ``after`` and ``before``, and otherwise keep this order.

    Raises:
        CallbackError: An element is not a callback, or is in the list twice.
        OrderError: The callbacks' ``after`` and ``before`` contradict each other.

    >>> from cadenza.callbacks import EarlyStopping, StopOnNonFinite
    >>> list(Hooks([StopOnNonFinite(), EarlyStopping("eval/loss", "min"), EarlyStopping("eval/acc", "max")]).callbacks)
    ['StopOnNonFinite', 'EarlyStopping', 'EarlyStopping#2']
    """

    reasons: list[str]
    """Why the order differs from the list, in sentences."""

    def __init__(self, callbacks: Iterable[BaseCallback] = ()) -> None:
        given = checked(callbacks)
        names = names_of(given)
        order, self.reasons = arranged(given, names)
        self.callbacks: dict[str, BaseCallback] = {names[index]: given[index] for index in order}
        self.by_moment: dict[Moment, list[Listener]] = {}
        for owner in self.callbacks:
            self._listen(owner)
        self.scene: DispatchState = DispatchState()
        """The state of the dispatch in the thread of the run."""
        self.fired: set[Moment] = set()
        self.profiler: Profiler | None = None
        """The profiler of a run with a profile."""
        self.timings: Timings | None = None
        """What it has measured, when it is over."""
        self.triggers: dict[tuple[tuple[str, ...], Hashable], Trigger] = {}
        """The schedules of the run, by the moments and the schedule."""
        self._lengths: tuple[int | None, ...] = ()
        self._calls: dict[Moment, Calls] = {}
        self._functions: dict[Moment, Callable[..., None]] = {}
        self._take_listeners()

    def __repr__(self) -> str:
        return f"<Hooks: {', '.join(self.callbacks) or 'no callbacks'}>"

    def fire(self, moment: Moment, run: Run, *arguments: Any, **keywords: Any) -> None:
        """Call all listeners of `moment`.

        Raises:
            MomentError: `moment` is not declared in a class with ``declares=True``, or the arguments do not fit it.
        """
        if keywords or moment not in self.fired:
            arguments = checked_arguments(moment, run, arguments, keywords)
            self.fired.add(moment)
        if moment in self._functions:
            if self.here() is self.scene:
                self._functions[moment](run, *arguments)
            else:
                self._fire_elsewhere(moment, run, *arguments)

    def _fire_elsewhere(self, moment: Moment, run: Run, *arguments: Any) -> None:
        """Call the listeners in a thread that does not train the run. What runs in it is not what runs in that thread."""
        scene = DispatchState(self.scene)
        token = ACTING.set(scene)
        try:
            fan_out(moment, self._calls[moment], scene, self.failed_in(moment))(run, *arguments)
        finally:
            ACTING.reset(token)

    def name_of(self, callback: object) -> str:
        """Return the name of `callback` in this run."""
        known = (name for name, value in self.callbacks.items() if value is callback)
        return next(known, type(callback).__name__)

    def here(self) -> DispatchState:
        """Return the state of the dispatch in the calling thread. Threads that a hook starts may use the run too."""
        return self.scene if self.scene.thread == get_ident() else _elsewhere(self.scene)

    def enter(self) -> None:
        """Take the calling thread for the one that trains the run: a custom loop may continue in another one."""
        self.scene.thread = get_ident()

    def current_owner(self) -> str | None:
        """Return the name of the callback with the hook that runs in this thread; None outside of hooks."""
        listener = self.here().listener
        return None if listener is None else listener.owner

    # -- callbacks of a run under way, at a step boundary: see `cadenza.loops.handle` ---

    def add(self, callback: BaseCallback) -> str:
        """Call the hooks of a callback from now on, in their order among the others. Return its name.

        Raises:
            CallbackError, OrderError: As for the list of callbacks.
        """
        given = checked([*self.callbacks.values(), callback])
        name = name_beside(self.callbacks, callback)
        names = [*self.callbacks, name]
        self.callbacks = {names[index]: given[index] for index in arranged(given, names)[0]}
        self._listen(name)
        index = {owner: index for index, owner in enumerate(self.callbacks)}
        for listeners in self.by_moment.values():
            listeners.sort(key=lambda listener: index[listener.owner])
        self._take_listeners()
        return name

    def drop(self, name: str) -> None:
        """Call the hooks of a callback no more."""
        self.callbacks = {owner: callback for owner, callback in self.callbacks.items() if owner != name}
        for moment, listeners in self.by_moment.items():
            self.by_moment[moment] = [listener for listener in listeners if listener.owner != name]
        self._take_listeners()

    def _listen(self, owner: str) -> None:
        for item in self.callbacks[owner].listeners():
            for listener in (item, item.twin):
                if listener is not None:
                    listener.begin(owner)
                    self.by_moment.setdefault(listener.moment, []).append(listener)

    def _take_listeners(self) -> None:
        """Call those listeners that `by_moment` holds."""
        for moment, listeners in self.by_moment.items():
            for listener in listeners:
                if listener.schedule is not None and listener.trigger is None:
                    listener.follow(self._trigger_of(listener, listener.schedule))
            self._calls[moment] = Calls(listeners)
        used = {listener.trigger for listeners in self.by_moment.values() for listener in listeners}
        self.triggers = {key: trigger for key, trigger in self.triggers.items() if trigger in used}
        self._make_functions(fan_out if self.profiler is None else partial(profiled_fan_out, self.profiler))

    # -- schedules: see `cadenza.hooks.schedule` ---------------------------------------------------

    def _trigger_of(self, listener: Listener, schedule: Schedule) -> Trigger:
        """Return the trigger of all listeners with an equal schedule at the same moment; a function is asked for each."""
        if listener.twin is not None and listener.twin.trigger is not None:
            return listener.twin.trigger
        alone = has_function(schedule) or not isinstance(schedule, Hashable)
        key = (listener.moments, id(listener) if alone else schedule)
        return self.triggers.setdefault(key, Trigger(schedule, listener.moments, listener.counting))

    def schedules_at(self, at: Progress) -> dict[str, Any]:
        """Return what a checkpoint holds of the schedules. Every rank must call this."""
        return state_of(self.triggers.values(), at)

    def restore_schedules(self, state: Mapping[str, Any], at: Progress) -> None:
        """Have the schedules go on from what `schedules_at` returned."""
        self.invalidate()
        restore(self.triggers.values(), state, at)

    def is_due(self, listener: Listener) -> bool:
        """Return whether the firing under way calls a listener with a schedule; not for functions, which each call asks."""
        calls = self._calls[listener.moment]
        return listener.trigger is not None and not listener.trigger.functions and listener in calls.listeners

    def invalidate(self) -> None:
        """Look at all schedules at the next firing of their moments."""
        for calls in self._calls.values():
            calls.invalidate()

    def refresh_schedules(self, at: Progress) -> None:
        """Ask schedules anew: at the end of an epoch, which may come early, and with which the length of the run may change."""
        self.invalidate()
        before, self._lengths = self._lengths, at.lengths
        for trigger in self.triggers.values():
            trigger.end_epoch(at, changed=before not in ((), at.lengths))

    def next_call(self, at: Progress) -> float:
        """Return the number of complete steps at the next call that concerns all ranks; infinite if none follows.

        Such are the calls of listeners that are not silent, and of schedules that are functions: they may read any counter.
        """
        following = math.inf
        for listener in chain.from_iterable(self.by_moment.get(moment, ()) for moment in _IN_STEPS):
            if not listener.silent or (listener.schedule is not None and has_function(listener.schedule)):
                following = min(following, 0 if listener.trigger is None else listener.trigger.next_step(at))
        return following

    def may_skip(self, moment: Moment) -> bool:
        """Return whether `moment` calls a listener in the current step that may skip the batch. It is the same on all ranks."""
        return moment in self._calls and any(not listener.silent for listener in self._calls[moment].listeners)

    def remove(self, moment: Moment, function: Callable[..., Any]) -> None:
        """Call a function at a moment no more in this run: it has nothing to do there. Every rank must call this."""
        self.by_moment[moment] = [hook for hook in self.by_moment.get(moment, ()) if hook.function != function]
        self._take_listeners()

    def _make_functions(self, make: Callable[[Moment, Calls, DispatchState, Failed], Callable[..., None]]) -> None:
        self._functions = {
            moment: make(moment, calls, self.scene, self.failed_in(moment)) for moment, calls in self._calls.items()
        }
        for moment in self._functions:
            self._show(moment)

    def _show(self, moment: Moment) -> None:
        """Set the hook of a moment to its function, or remove it if there is nothing to call."""
        name = moment.__name__
        if moments_of(Callback).get(name) is moment:
            if self._calls[moment].every or (self.profiler is not None and name in TIMED_MOMENTS):
                setattr(self, name, self._functions[moment])
            else:
                vars(self).pop(name, None)

    # -- a profile ---------------------------------------------------------------------------------

    def start_profile(self, profiler: Profiler) -> None:
        """Measure moments with `profiler` from now on: those with listeners, and those that start or end a phase."""
        self.profiler = profiler
        for name, moment in moments_of(Callback).items():
            if name in TIMED_MOMENTS:
                self._calls.setdefault(moment, Calls([]))
        self._make_functions(partial(profiled_fan_out, profiler))

    def end_profile(self) -> None:
        """Stop measuring."""
        self.profiler = None
        for listener in chain.from_iterable(self.by_moment.values()):
            listener.span = None  # it holds the listener
        self._make_functions(fan_out)

    def timed(self, name: str, owner: str = "") -> AbstractContextManager[None]:
        """Measure the block in a profile as a phase, such as ``"saving"``; with `owner`, as work of this callback."""
        return nullcontext() if self.profiler is None else self.profiler.timed(name, owner)

    # -- errors ------------------------------------------------------------------------------------

    def end(self, error: BaseException | None, moment: Moment, run: Run, *values: Any) -> None:
        """Fire a moment that ends a section of the run. `error` ends it early, or is None."""
        with self.unwinding_of(error):
            getattr(self, moment.__name__)(run, *values)

    def ending(self, moment: Moment, run: Run, *values: Any) -> ExitStack:
        """Return a context that fires a moment when its block ends, also after an error in it."""
        stack = ExitStack()
        stack.push(lambda kind, error, traceback: self.end(error, moment, run, *values))
        return stack

    def unwinding_of(self, error: BaseException | None) -> ExitStack:
        """Begin a context in which errors of hooks are added as notes to `error`, which is being raised. It may be None."""
        self.enter()
        scene, ending = self.scene, ExitStack()
        ending.callback(setattr, scene, "unwinding", scene.unwinding)
        scene.unwinding = error or scene.unwinding
        return ending

    @property
    def unwinding(self) -> BaseException | None:
        """The error that is being raised while a moment fires in this thread; None if there is none."""
        return self.here().unwinding

    def failed(
        self, owner: str, where: str, error: BaseException, run: Run, first: BaseException | None = None, event: str = ""
    ) -> BaseException | None:
        """Handle an error of the callback `owner` as its ``on_fault`` says. No other code reads ``on_fault``.

        Returns:
            The error to raise at the end: `first`, an earlier one, if given; None if the callback was disabled.
        """
        under_way = first or self.unwinding
        if under_way is not None:
            add_note(under_way, f"then {owner}.{event or where} failed as well: {error!r}")
            return first
        callback = self.callbacks.get(owner)  # None: an error of the run itself
        if callback is None:
            return error
        if callback.on_fault != "raise" and isinstance(error, Exception) and not _is_wrong_argument(error, where):
            self._disable(owner)
            if all(fault.callback != owner for fault in run.faults):  # closing a broken callback often fails as well
                run._session.report(Fault(owner, where, error, run.progress.now()))
            return None
        if not any(note.startswith(_RAISED) for note in notes_of(error)):
            index = f"callback {list(self.callbacks).index(owner) + 1} of {len(self.callbacks)}"
            add_note(error, f"{_RAISED}{owner}.{event or where} ({index}) at {run.progress.now()}")
        return error

    def failed_in(self, moment: Moment) -> Failed:
        """Return the handler of errors at `moment`. A moment that ends a section calls all listeners, also after an error."""
        reaches_all, hooks = moment.__name__.endswith("_end") or moment is Callback.on_exception, proxy(self)

        def failed(
            listener: Listener, error: BaseException, run: Run, first: BaseException | None
        ) -> tuple[BaseException | None, bool]:
            owner = "the run" if listener.shared else listener.owner
            first = hooks.failed(owner, moment.__name__, error, run, first, listener.event)
            if first is not None and listener.on_error is not None:
                listener.on_error(error)
            return first, first is not None and not reaches_all

        return failed

    def call(self, listeners: Sequence[Listener], run: Run, *values: Any) -> None:
        """Call some listeners of one moment, in order."""
        if listeners:
            moment = listeners[0].moment
            fan_out(moment, Calls(listeners), self.scene, self.failed_in(moment))(run, *values)

    def carry_out(self, acts: Iterable[Callable[[], object]], run: Run, where: str = "at_end") -> None:
        """Call all of `acts`, also after an error. Each error is handled by its owner's ``on_fault``; the first is raised.

        A `Closer` runs for the hook that registered it: decisions in it have that author.
        """
        first: BaseException | None = None
        scene = self.here()
        outer = scene.listener
        for act in acts:
            scene.listener = act.listener if isinstance(act, Closer) else None
            owner = self.current_owner() or "the run"
            try:
                with self.timed(where, owner) if isinstance(act, Closer) else nullcontext():
                    act()
            except BaseException as error:
                first = self.failed(owner, where, error, run, first)
            finally:
                scene.listener = outer
        try:
            if first is not None:
                raise first
        finally:
            del first  # its traceback holds this frame

    def _disable(self, owner: str) -> None:
        for listeners in self.by_moment.values():
            for listener in listeners:
                if listener.owner == owner and not listener.shared:
                    listener.disable()
                    if self.profiler is not None:
                        listener.span = self.profiler.loop  # its row keeps the calls until now


def _elsewhere(of: DispatchState) -> DispatchState:
    """Return the scene of a thread that does not train the run. Its context may be a copy: asyncio makes copies for threads."""
    acting = ACTING.get()
    return acting if acting is not None and acting.of is of and acting.thread == get_ident() else DispatchState(of)


_RAISED = "raised in "


def _is_in_step(moment: Moment) -> bool:
    counting = counting_of(moment)
    return counting.unit in ("step", "batch") and not counting.main_only


_IN_STEPS: list[Moment] = [*filter(_is_in_step, moments_of(Callback).values())]
"""The moments of a step on all ranks, which declare that they count steps or batches."""


def _is_wrong_argument(error: Exception, where: str) -> bool:
    """Return whether an error is about how a callback was made, which ends the run whatever ``on_fault`` says."""
    return isinstance(error, MonitorError) or (isinstance(error, CadenzaError) and where in ("on_setup", "on_fit_start"))


def checked(callbacks: Iterable[BaseCallback]) -> list[BaseCallback]:
    """Return the callbacks as a list. Raise `CallbackError` for an element that is none, or is in the list twice."""
    given, seen = list(callbacks), set[int]()
    for index, callback in enumerate(given):
        if isinstance(callback, type) and issubclass(callback, BaseCallback):
            raise CallbackError(
                f"callbacks[{index}] is the class {callback.__name__}; expected an instance: {callback.__name__}(...)"
            )
        if not isinstance(callback, BaseCallback):
            raise CallbackError(
                f"callbacks[{index}] is not a callback: expected an instance of Callback, or a function made into one with "
                f"@on(Callback.on_step_end); got {brief(callback)}"
            )
        if id(callback) in seen:
            raise CallbackError(f"callbacks[{index}] is in the list twice: {callback!r}. Make a second instance.")
        seen.add(id(callback))
    return given
