"""Functions as callbacks: `on` subscribes a function to a moment; `periodic` makes a listener from an ``every`` argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, SupportsIndex

from cadenza.errors import MomentError
from cadenza.hooks.cadence import Cadence, Interval
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment, check_declared, check_fits, counter_of
from cadenza.hooks.numbers import at_least
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
    """Make a callback from a function, which is called at `moment`.

    Args:
        moment: The entry of the table itself, such as ``Callback.on_step_end``.
        every: A number counts what the moment counts: steps on a step moment, batches on a batch moment, epochs on an epoch
            moment. A text such as ``"500 steps"`` or ``"10 min"`` names its unit. If the moment counts another unit, the
            function is called at the first moment after each interval.
        at: Call the function once, at the n-th.
        when: Call the function when ``when(run)`` is true.

    Raises:
        ValueError: More than one of `every`, `at` and `when`, or `at` is below 1.
        CadenceError: `every` is not a cadence.
        MomentError: `moment` is not a moment, has no counter, or the function does not fit it.

    >>> on(Callback.on_step_end, every=150)(print)
    print: on_step_end (every 150 steps)
    """
    check_declared(moment)
    schedule = _schedule(moment, every, at, when)

    def subscribe(function: Callable[P, object]) -> Subscription:
        return Subscription(moment, function, schedule)

    return subscribe


def periodic(every: Interval, function: Callable[[Run], object], note: str = "", *, asks: bool | None = None) -> Listener:
    """Return a listener that calls `function` at the end of epochs if `every` counts whole epochs, else at the end of steps.

    Use it in `Callback.listeners` of a class that takes `every` as an argument.

    Args:
        every: The interval; see `Cadence`.
        function: Called with the run.
        note: A remark for the plan.
        asks: Whether the function may log or make requests; None takes `Callback.asks` of the class.

    Raises:
        CadenceError: `every` is not a cadence.

    >>> periodic("2 epochs", print).moment.__name__, periodic("500 steps", print).moment.__name__
    ('on_epoch_end', 'on_step_end')
    """
    cadence = Cadence.parse(every)
    at_epoch_end = isinstance(cadence, Cadence) and cadence.whole_epochs
    return Listener(Callback.on_epoch_end if at_epoch_end else Callback.on_step_end, function, cadence, note, asks)


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
        raise MomentError(f"{moment.__name__} has no counter for {name}=. Use when=, a function (run) -> bool.")
    if every is None:
        return At(at_least(1, "at", at), *counter)
    cadence = Cadence.parse(every)
    if isinstance(cadence, Cadence) and (isinstance(every, SupportsIndex) or (cadence.unit == counter[0] and cadence.whole)):
        return Every(int(cadence.interval), *counter)
    return cadence
