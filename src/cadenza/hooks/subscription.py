"""Functions as callbacks: `on` subscribes a function to a moment; `periodic` makes a listener from an ``every`` argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec
from weakref import proxy

from cadenza.errors import MomentError, ScheduleError
from cadenza.hooks.counters import counting_of, kept
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment, check_declared, check_fits
from cadenza.hooks.schedule import At, Every, Interval, Schedule, When, has_function

if TYPE_CHECKING:
    from cadenza.run import Run

P = ParamSpec("P")


def on(
    moment: Callable[Concatenate[Any, P], None],
    *,
    every: Interval | None = None,
    at: int | str | At | None = None,
    when: Callable[[Run], bool] | None = None,
) -> Callable[[Callable[P, object]], Subscription]:
    """Make a callback from a function, which is called at `moment`.

    Args:
        moment: The entry of the table itself, such as ``Callback.on_step_end``.
        every: When to call the function, at any moment: a number, a text such as ``"500 steps"`` or ``"10 min"``, a `Schedule`
            such as ``Every("500 steps") & First("2 epochs")``, or a function (run) -> bool. A number counts what the moment
            counts: steps on a step moment, batches on a batch moment, epochs on an epoch moment, and how often it fired in the
            run on others. In another unit, it is called at the first firing of the moment after each interval.
        at: Call the function once, at the n-th, or at a point such as ``"3 epochs"``.
        when: Call the function when ``when(run)`` is true. Each rank asks for itself.

    Raises:
        ValueError: More than one of `every`, `at` and `when`.
        ScheduleError: `every` is no schedule, or `at` is no point.
        MomentError: `moment` is not a moment, or the function does not fit it.

    >>> on(Callback.on_step_end, every=150)(print)
    print: on_step_end (every 150 steps)
    """
    check_declared(moment)
    names = [name for name, value in (("every", every), ("at", at), ("when", when)) if value is not None]
    if len(names) > 1:
        raise ValueError(
            f"expected one of every=, at= and when=; got {' and '.join(names)}. Keep one, or compose schedules: every=A & B."
        )
    given: Interval | None = every if at is None else at if isinstance(at, At) else At(at)
    if when is not None:
        given = When(when, alone=True)
    schedule = None if given is None else Schedule.parse(given, counting_of(moment).unit)

    def subscribe(function: Callable[P, object]) -> Subscription:
        return Subscription(moment, function, schedule)

    return subscribe


def periodic(every: Interval, function: Callable[[Run], object], note: str = "") -> Listener:
    """Return a listener that calls `function` at the end of epochs if `every` counts whole epochs, else at the end of steps.

    If it counts whole epochs and something else, such as ``Every("1 epoch") | At("10 steps")``, the function is called at both,
    and once if both come together. Use it in `Callback.listeners` of a class that takes `every` as an argument.

    Args:
        every: The schedule; see `Schedule.parse`. A bare number counts steps.
        function: Called with the run.
        note: A remark for the plan.

    Raises:
        ScheduleError: `every` is no schedule.

    >>> periodic("2 epochs", print).moment.__name__, periodic("500 steps", print).moment.__name__
    ('on_epoch_end', 'on_step_end')
    """
    schedule = Schedule.parse(every)
    if schedule.only_epochs:
        return Listener(Callback.on_epoch_end, function, schedule, note)
    listener = Listener(Callback.on_step_end, function, schedule, note)
    if any(leave.only_epochs for leave in schedule.leaves()):
        listener.twin = Listener(Callback.on_epoch_end, function, schedule, note, twin=proxy(listener))
    return listener


def in_steps(every: Interval, owner: str, why: str, remedy: str = "") -> Schedule:
    """Return the schedule of a listener inside of steps, which must count steps: it is due in the same steps at any moment.

    Args:
        every: The schedule; see `Schedule.parse`.
        owner: The callback and its argument, for the message.
        why: Why it must count steps, for the message.
        remedy: What else to do, for the message.

    Raises:
        ScheduleError: `every` is no schedule, or does not count steps.

    >>> in_steps("1 epoch", "Check(every=...)", "a step is checked before its update")
    Traceback (most recent call last):
        ...
    cadenza.errors.ScheduleError: a step is checked before its update, so Check(every=...) needs an interval in steps, such as \
"500 steps"; got 'every epoch'.
    """
    schedule = Schedule.parse(every)
    if has_function(schedule) or any(length.unit != "step" for length in schedule.lengths):
        needs = f'{why}, so {owner} needs an interval in steps, such as "500 steps"'
        raise ScheduleError(f"{needs}; got {str(schedule)!r}.{remedy and f' {remedy}'}")
    return schedule


def point(given: str | At) -> At:
    """Return a point of the run that is the same after a resume.

    Raises:
        ScheduleError: `given` is no point, or counts what a resumed run counts anew.

    >>> point("3 epochs")
    At('3 epochs')
    >>> point("10 min")
    Traceback (most recent call last):
        ...
    cadenza.errors.ScheduleError: '10 min' is no point of a run that is the same after a resume: expected epochs, steps, \
batches, samples, tokens or "10%", such as "3 epochs"
    """
    at = given if isinstance(given, At) else At(given)
    if not at.unit or not kept(at.unit):
        raise ScheduleError(
            f"{at.length.text!r} is no point of a run that is the same after a resume: expected epochs, steps, batches, "
            'samples, tokens or "10%", such as "3 epochs"'
        )
    return at


def steps_in(given: int | str, expected: str) -> int:
    """Return the number of steps of an argument such as ``"100 steps"`` or 100.

    Args:
        given: The argument.
        expected: What it must be, for the message, with its name.

    Raises:
        ValueError: It counts something else than whole steps.

    >>> steps_in("100 steps", "back must be a number of steps")
    100
    """
    length = Every(given).length.of("step")
    if length.unit != "step" or not length.whole:
        raise ValueError(f"{expected}; got {given!r}")
    return int(length.count)


class Subscription(Callback):
    """A function that `on` subscribed to a moment. A call of the subscription calls the function."""

    def __init__(self, moment: Moment, function: Callable[..., object], schedule: Schedule | None) -> None:
        if not callable(function):
            raise MomentError(f"expected a function for {moment.__name__}; got {function!r}")
        check_declared(moment)
        check_fits(function, moment)
        self.name: str | None = getattr(function, "__name__", type(function).__name__)
        self.moment: Moment = moment
        self.function: Callable[..., object] = function
        self.schedule: Schedule | None = schedule

    def listeners(self) -> list[Listener]:
        return [Listener(self.moment, self.function, self.schedule)]

    def __call__(self, *arguments: Any) -> object:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{self.name}: {self.moment.__name__}" + (f" ({self.schedule})" if self.schedule else "")
