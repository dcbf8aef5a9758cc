"""Functions as callbacks: `on` for one moment, and `periodic` for a callback whose schedule is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, SupportsIndex

from cadenza.errors import MomentError
from cadenza.hooks.cadence import Cadence, Interval, whole_number
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment, check_declared, check_fits, counter_of
from cadenza.hooks.schedule import At, Every, Schedule, When

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
    schedule = _schedule(moment, every, at, when)

    def subscribe(function: Callable[P, object]) -> Subscription:
        return Subscription(moment, function, schedule)

    return subscribe


def periodic(every: Interval, function: Callable[[Run], object], note: str = "", *, asks: bool | None = None) -> Listener:
    """Return a listener that calls `function` on a schedule: whole epochs at the end of an epoch, others at that of a step.

    For the `Callback.listeners` of a class whose schedule is an argument. `note` is its remark in the plan. `asks` says whether
    the function may log, or ask the run for anything; None takes `Callback.asks` of the class.

    Raises:
        CadenceError: `every` is no cadence.
    """
    cadence = Cadence.parse(every)
    at_epoch_end = isinstance(cadence, Cadence) and cadence.whole_epochs
    return Listener(Callback.on_epoch_end if at_epoch_end else Callback.on_step_end, function, cadence, note, asks)


class Subscription(Callback):
    """A function on one moment, as `on` makes it. Calling it calls the function."""

    def __init__(self, moment: Moment, function: Callable[..., object], schedule: Schedule | None) -> None:
        if not callable(function):
            raise MomentError(f"expected a function for {moment.__name__}; got {function!r}")
        check_declared(moment)
        check_fits(function, moment)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.moment, self.function, self.schedule = moment, function, schedule

    def listeners(self) -> list[Listener]:
        return [Listener(self.moment, self.function, self.schedule)]

    def __call__(self, *arguments: Any) -> object:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{self.name}: {self.moment.__name__}" + (f" ({self.schedule})" if self.schedule else "")


def _schedule(moment: Moment, every: Interval | None, at: int | None, when: Callable[[Run], bool] | None) -> Schedule | None:
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
