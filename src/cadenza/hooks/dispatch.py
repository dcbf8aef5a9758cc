"""Fan every moment out to the callbacks that hear it, in order; and functions as callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, SupportsIndex

from cadenza.errors import CallbackError, MomentError, add_note, notes_of
from cadenza.hooks.cadence import At, Cadence, Every, Filter, Interval, When, whole_number
from cadenza.hooks.fan_out import Left, Rota, fan_out, watched_fan_out
from cadenza.hooks.gates import nothing
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import (
    BaseCallback,
    Callback,
    Moment,
    check_declared,
    check_fits,
    checked_arguments,
    counter_of,
    moments_of,
)
from cadenza.hooks.order import arranged, names_of, reasons
from cadenza.profiling.spans import PARTING, Account, Watch
from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from cadenza.run import Run

P = ParamSpec("P")


def on(
    moment: Callable[Concatenate[Any, P], None],
    *,
    every: Interval | None = None,
    at: int | None = None,
    when: Callable[[Run], bool] | None = None,
) -> Callable[[Callable[P, object]], Subscription]:
    """Make a callback of a function: it is called at `moment`.

    Args:
        moment: The entry of the table itself, such as ``Callback.on_step_end``.
        every: A number counts what the moment counts: steps on a step moment, batches on a batch moment, epochs on an epoch
            moment. A text such as ``"500 steps"`` or ``"10 min"`` names its unit; with another unit than that of the moment,
            the function is called at the first moment after each interval.
        at: Call once, at the n-th.
        when: Call when this function of the run says so.

    Raises:
        ValueError: More than one of `every`, `at` and `when`, or `at` is below 1.
        CadenceError: `every` is no cadence.
        MomentError: The moment is none, has no counter to filter by, or the function does not fit it.

    >>> on(Callback.on_step_end, every=150)(print)
    print: on_step_end (every 150 steps)
    """
    check_declared(moment)
    filter = _filter(moment, every, at, when)

    def subscribe(function: Callable[P, object]) -> Subscription:
        return Subscription(moment, function, filter)

    return subscribe


def periodic(every: Interval, function: Callable[[Run], object], note: str = "") -> Listener:
    """Return a listener that calls `function` at a cadence: whole epochs at the end of an epoch, others at that of a step.

    For the `Callback.listeners` of a class whose cadence is an argument. `note` stands beside it in the plan.

    Raises:
        CadenceError: `every` is no cadence.
    """
    cadence = Cadence.parse(every)
    at_epoch_end = isinstance(cadence, Cadence) and cadence.whole_epochs
    return Listener(Callback.on_epoch_end if at_epoch_end else Callback.on_step_end, function, cadence, note)


def hooks_of(run: Run) -> Hooks:
    """Return the dispatch of a run, which knows its callbacks by name."""
    return run._session.hooks


class Subscription(Callback):
    """A function on one moment, as `on` makes it. Calling it calls the function."""

    def __init__(self, moment: Moment, function: Callable[..., object], filter: Filter | None) -> None:
        if not callable(function):
            raise MomentError(f"expected a function for {moment.__name__}; got {function!r}")
        check_declared(moment)
        check_fits(function, moment)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.moment, self.function, self.filter = moment, function, filter

    def listeners(self) -> list[Listener]:
        return [Listener(self.moment, self.function, self.filter)]

    def __call__(self, *arguments: Any) -> object:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{self.name}: {self.moment.__name__}" + (f" ({self.filter})" if self.filter else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a hook of a callback that is disabled for it; training went on."""

    callback: str
    moment: str
    error: Exception
    at: Counters

    def __str__(self) -> str:
        return f"{self.callback} failed in {self.moment} at {self.at} and is disabled: {self.error!r}"


@dataclass(frozen=True, slots=True)
class Closer:
    """What a callback asked to have done later: at the border of a step, or when the run is over."""

    owner: str
    close: Callable[[], object]

    def __call__(self) -> None:
        self.close()


class Hooks(Callback):
    """All callbacks of a run as one: calling a hook of it calls that hook of each callback that overrides it.

    ``hooks.on_step_end(run)`` is therefore completed and checked by every tool, with no second list of moments.

    Raises:
        CallbackError: An element is no callback, or stands there twice.
        OrderError: The callbacks' ``after`` and ``before`` contradict each other.
    """

    def __init__(self, callbacks: Iterable[BaseCallback] = ()) -> None:
        given = _checked(callbacks)
        names = names_of(given)
        order = arranged(given, names)
        self.callbacks = {names[place]: given[place] for place in order}
        self.reasons = reasons(given, names)
        self.heard: dict[Moment, list[Listener]] = {}
        for owner, callback in self.callbacks.items():
            for listener in callback.listeners():
                listener.owner = owner
                self.heard.setdefault(listener.moment, []).append(listener)
        self.fired: set[Moment] = set()
        self._calls: dict[Listener, Callable[..., Any]] = {}
        for heard in self.heard.values():
            for listener in heard:
                call = listener.bound()
                # One function may be subscribed twice: each call must be told from the other.
                self._calls[listener] = partial(call) if call in self._calls.values() else call
        self._calls_at = {moment: [self._calls[listener] for listener in heard] for moment, heard in self.heard.items()}
        self._rotas = {moment: Rota(calls) for moment, calls in self._calls_at.items()}
        self._fan_outs = {moment: fan_out(self, moment, rota) for moment, rota in self._rotas.items()}
        self._hushed: list[Moment] = []
        self._show(self._fan_outs)
        self.watched: Watch | None = None
        """Who keeps the time of this run; None if nobody does."""
        self._watched_at: dict[Moment, list[tuple[Callable[..., Any], Account]]] = {}

    def fire(self, moment: Moment, run: Run, *arguments: Any, **keywords: Any) -> None:
        """Call `moment` on everybody who hears it.

        Raises:
            MomentError: `moment` is not declared in a class with ``declares=True``, or the arguments do not fit it.
        """
        if keywords or moment not in self.fired:
            arguments = checked_arguments(moment, run, arguments, keywords)
            self.fired.add(moment)
        if moment in self._fan_outs:
            self._fan_outs[moment](run, *arguments)

    def name_of(self, callback: object) -> str:
        """Return the name by which this run knows `callback`."""
        known = (name for name, one in self.callbacks.items() if one is callback)
        return next(known, type(callback).__name__)

    def speaker(self) -> str | None:
        """Return the name of the callback whose hook is running; None outside of hooks.

        Found by walking the stack, as ``logging`` finds its caller, so that it costs nothing until somebody asks.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("HOOKS") is self:
                listener: Listener = self._listener(frame.f_globals["MOMENT"], frame.f_locals["call"])
                return listener.owner
            frame = frame.f_back
        return None

    def carry_out(self, acts: Iterable[Callable[[], object]], run: Run) -> None:
        """Call all of `acts`, whatever happens, each under its owner's ``on_fault``; raise the first error in the end."""
        first: BaseException | None = None
        for act in acts:
            owner = act.owner if isinstance(act, Closer) else "the run"
            try:
                with self.during("at_end", owner) if isinstance(act, Closer) else nullcontext():
                    act()
                continue
            except BaseException as error:
                fault = error
            first = self.failed(owner, "at_end", fault, run, first)
        if first is not None:
            raise first

    def watch(self, watch: Watch) -> None:
        """From now on have moments hand on the time of `watch`: those that are heard, and those that part what the run does.

        A run that is not watched pays nothing.
        """
        self.watched = watch
        unheard = [moment for name, moment in moments_of(Callback).items() if name in PARTING]
        for moment in dict.fromkeys([*unheard, *self._calls_at]):
            calls = self._watched_at[moment] = self._with_accounts(moment)
            self._fan_outs[moment] = watched_fan_out(self, moment, calls, watch)
        self._show(self._fan_outs)

    def unwatch(self) -> None:
        """Call everybody as before."""
        self.watched, self._watched_at = None, {}
        for moment in self._fan_outs.keys() - self._calls_at.keys():
            delattr(self, moment.__name__)
        self._fan_outs = {moment: fan_out(self, moment, rota) for moment, rota in self._rotas.items()}
        self._show(self._fan_outs)

    def hush(self, moment: Moment, progress: Progress, until: float) -> None:
        """Let a moment be as one that nobody hears until so many steps are complete."""
        if vars(self).pop(moment.__name__, None) is not None:
            self._hushed.append(moment)
            progress.wake_at(until, self._rouse)

    def _rouse(self) -> None:
        hushed, self._hushed = self._hushed, []
        for moment in hushed:
            self._rotas[moment].rouse()
        self._show({moment: self._fan_outs[moment] for moment in hushed})

    def may_ask(self, progress: Progress) -> bool:
        """Return whether somebody who asks may be called after a forward pass before one more step is complete."""
        return self._may_call(_LATE, progress, asking=True)

    def quiet_steps(self, progress: Progress) -> float:
        """Return in how many steps after the one under way nobody will be called."""
        if self._may_call(_IN_STEPS, progress, asking=False):
            return 0
        return progress.alarm - progress.step - 2 if self._hushed else math.inf

    def _may_call(self, moments: Iterable[str], progress: Progress, *, asking: bool) -> bool:
        shown = vars(self)
        woken = self._hushed if self._hushed and progress.alarm <= progress.step + 1 else ()
        for name in moments:
            moment = moments_of(Callback)[name]
            heard = self.heard.get(moment) if name in shown or moment in woken else None
            if heard and (not asking or any(self.callbacks[listener.owner].asks for listener in heard)):
                return True
        return False

    def call_of(self, listener: Listener) -> Callable[..., Any]:
        """Return what this run calls for a listener: its function, or the gate before it."""
        return self._calls[listener]

    def during(self, name: str, owner: str = "") -> AbstractContextManager[None]:
        """Name what is done inside, such as ``"saving"``, for a profile; with `owner` it is what this callback does there."""
        return nullcontext() if self.watched is None else self.watched.during(name, owner)

    def _show(self, fan_outs: Mapping[Moment, Callable[..., None]]) -> None:
        """Let the hooks of the table be these."""
        for moment, function in fan_outs.items():
            if moments_of(Callback).get(moment.__name__) is moment:
                setattr(self, moment.__name__, function)

    def _with_accounts(self, moment: Moment) -> list[tuple[Callable[..., Any], Account]]:
        watch = self.watched
        assert watch is not None
        calls = self._calls_at.get(moment, [])
        return [(c, watch.loop if c is nothing else watch.account_of(self._listener(moment, c))) for c in calls]

    def failed(
        self, owner: str, where: str, error: BaseException, run: Run, first: BaseException | None = None
    ) -> BaseException | None:
        """Deal with an error of the callback called `owner`: the one place where its ``on_fault`` is looked at.

        Returns:
            The error that must be raised in the end: `first`, an earlier one, if given; None if this one is dealt with.
        """
        under_way = first or unwinding()
        if under_way is not None:
            add_note(under_way, f"then {owner}.{where} failed as well: {error!r}")
            return first
        callback = self.callbacks.get(owner)  # None: the error is the run's own
        if callback is None:
            return error
        if callback.on_fault == "disable" and isinstance(error, Exception):
            self._disable(owner)
            if all(fault.callback != owner for fault in run.faults):  # closing what broke often fails as well
                run._session.report(Fault(owner, where, error, run.progress.now()))
            return None
        if not any(note.startswith(_RAISED) for note in notes_of(error)):
            place = f"callback {list(self.callbacks).index(owner) + 1} of {len(self.callbacks)}"
            add_note(error, f"{_RAISED}{owner}.{where} ({place}) at {run.progress.now()}")
        return error

    def _failed(
        self, moment: Moment, call: Callable[..., Any], error: BaseException, run: Run, first: BaseException | None
    ) -> BaseException | None:
        listener = self._listener(moment, call)
        if isinstance(error, Left):
            if isinstance(unwinding(), Left):
                return first  # a second evaluation, of those that wait for the resume
            error.listener = listener
        return self.failed(listener.owner, moment.__name__, error, run, first)

    def _disable(self, owner: str) -> None:
        for moment, heard in self.heard.items():
            gone = [self._calls[listener] for listener in heard if listener.owner == owner]
            heard[:] = [listener for listener in heard if listener.owner != owner]
            # In place, so that a moment that is under way does not call it either.
            calls = self._calls_at[moment]
            calls[:] = [nothing if call in gone else call for call in calls]
            self._rotas[moment].update()
            if self.watched is not None:
                self._watched_at[moment][:] = self._with_accounts(moment)

    def _listener(self, moment: Moment, call: Callable[..., Any]) -> Listener:
        return next(listener for listener, bound in self._calls.items() if bound is call and listener.moment is moment)


_RAISED = "raised in "
_LATE = (
    *("on_fetch_start", "on_fetch_end", "on_batch_end", "on_step_end"),
    *(name for name in moments_of(Callback) if name.startswith(("on_before", "on_after"))),
)
_IN_STEPS = ("on_step_start", "on_batch_start", *_LATE)


def unwinding() -> BaseException | None:
    """Return the error on whose way out an end moment is being fired, if there is one.

    Asked outside of any ``except`` of the fan-out, so what is being handled now is what the caller's ``finally`` or
    ``except`` handles; it counts if that caller is Cadenza's, and not a hook that handles an error of its own.
    """
    error = sys.exception()
    if error is None or error.__traceback__ is None:
        return None
    handler = error.__traceback__.tb_frame.f_globals.get("__name__", "")
    return error if handler.startswith("cadenza.") else None


def _checked(callbacks: Iterable[BaseCallback]) -> list[BaseCallback]:
    given = list(callbacks)
    for place, callback in enumerate(given):
        if isinstance(callback, type) and issubclass(callback, BaseCallback):
            raise CallbackError(
                f"callbacks[{place}] is the class {callback.__name__}; expected an instance: {callback.__name__}(...)"
            )
        if not isinstance(callback, BaseCallback):
            raise CallbackError(
                f"callbacks[{place}] is no callback: expected an instance of Callback, or a function made into one with "
                f"@on(Callback.on_step_end); got {callback!r}"
            )
        if any(callback is other for other in given[:place]):
            raise CallbackError(f"callbacks[{place}] stands in the list twice: {callback!r}. Make a second instance.")
    return given


def _filter(moment: Moment, every: Interval | None, at: int | None, when: Callable[[Run], bool] | None) -> Filter | None:
    given = {name: value for name, value in (("every", every), ("at", at), ("when", when)) if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(
            f"expected one of every=, at= and when=; got {' and '.join(given)}. Keep one, or test in the function."
        )
    if when is not None:
        if not callable(when):
            raise TypeError(f"when must be a function (run) -> bool; got {when!r}")
        return When(when)
    if (counter := counter_of(moment)) is None:
        name = next(iter(given))
        raise MomentError(f"{moment.__name__} has no counter for {name}=. Use when=, which asks a function of the run.")
    if every is None:
        if (count := whole_number(at)) is None or count < 1:
            raise ValueError(f"at must be a whole number of at least 1; got {at!r}")
        return At(count, *counter)
    cadence = Cadence.parse(every)
    if isinstance(cadence, Cadence) and (isinstance(every, SupportsIndex) or (cadence.unit == counter[0] and cadence.whole)):
        return Every(int(cadence.interval), *counter)
    return cadence
