"""Listeners: a function, the moment that calls it, and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import proxy

from cadenza.hooks.counting import Counting, counting_of
from cadenza.hooks.schedule import Schedule
from cadenza.status.shown import brief

if TYPE_CHECKING:
    from cadenza.hooks.trigger import Trigger
    from cadenza.profiling.spans import Span
    from cadenza.run import Run


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Listener:
    """A function that one moment calls, on a schedule or each time.

    If the arguments of a callback decide about its moments, it returns listeners from `Callback.listeners`.

    >>> from cadenza import Callback
    >>> from cadenza.testing import tiny_run
    >>> class Count(Callback):
    ...     steps = 0
    ...     def listeners(self):
    ...         return [Listener(Callback.on_step_end, self.add)]
    ...     def add(self, run):
    ...         self.steps += 1
    >>> count = Count()
    >>> run = tiny_run(callbacks=[count])
    >>> count.steps
    5
    """

    moment: Callable[..., None]
    """The entry of the table, such as ``Callback.on_step_end``."""

    function: Callable[..., Any]
    """Called with the moment's arguments. Its return value is ignored."""

    schedule: Schedule | None = None
    """None calls the function each time. What ``every=`` accepts, such as ``"5 min"``, is read."""

    note: str = ""
    """A remark for the plan, such as a limit."""

    silent: bool = False
    """Whether the function neither logs, nor makes requests, nor reads samples, tokens or the time of the run: multiple ranks
    need no exchange for it in a step."""

    event: str = ""
    """The name of the hook in another system, which errors show; empty: the name of the moment."""

    inner: bool = False
    """Whether it prepares other listeners of its callback, and plans leave it out."""

    shared: bool = False
    """Whether it works for other callbacks too. It goes on if its callback is disabled for an error, and its own are raised."""

    on_error: Callable[[BaseException], object] | None = None
    """Called with an error of the function, unless the callback is disabled for it, before the next listener is called."""

    owner: str = ""
    """The name of the callback in the run. `Hooks` sets it."""

    calls: int | None = None
    """The number of its calls, if each of them asks a function of the user first; else None."""

    twin: Listener | None = None
    """The other one of two listeners that share a schedule: this one at the end of steps, the twin at the end of epochs.

    The twin refers to this one weakly.
    """

    # -- in a run, for the dispatch ----------------------------------------------------------------

    call: Callable[..., Any] = field(init=False, repr=False)
    """The function, a wrapper that checks the schedule, or `nothing` if the callback is disabled."""

    trigger: Trigger | None = field(init=False, default=None, repr=False)
    """The schedule in the run."""

    disabled: bool = field(init=False, default=False, repr=False)
    """Whether its callback is disabled for an error."""

    span: Span | None = field(init=False, default=None, repr=False)
    """Its time in a run with a profile."""

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self.schedule = Schedule.parse(self.schedule, self.counting.unit)

    @property
    def counting(self) -> Counting:
        """How its schedule counts."""
        return counting_of(self.moment)

    @property
    def moments(self) -> tuple[str, ...]:
        """The name of its moment; with a twin, both names."""
        pair = (self,) if self.twin is None else (self, self.twin)
        return tuple(sorted({one.moment.__name__ for one in pair}))

    def begin(self, owner: str) -> None:
        """Reset all state for a run that starts."""
        self.owner, self.call, self.trigger, self.span = owner, self.function, None, None
        self.disabled, self.calls = False, None

    def follow(self, trigger: Trigger) -> None:
        """Call the function when a trigger is due. If that has a function of the user, it is asked by the call."""
        function, self.trigger = self.function, trigger
        own = proxy(self)  # which holds the wrapper

        def call_if_due(run: Run, *values: Any) -> None:
            if trigger.due(run) and not own.disabled:
                own.calls += 1
                function(run, *values)

        if trigger.functions:
            self.call, self.calls = call_if_due, 0

    def disable(self) -> None:
        """Call the function no more in this run. A schedule goes on, as it does on the ranks that did not fail."""
        self.disabled = True
        if self.trigger is None or not self.trigger.functions:
            self.call = nothing

    def __repr__(self) -> str:
        return f"<Listener: {self.moment.__name__} calls {brief(self.function)}{f' of {self}' if self.owner else ''}>"

    def __str__(self) -> str:
        remarks = ", ".join(str(remark) for remark in (self.schedule, self.note) if remark)
        return f"{self.owner} ({remarks})" if remarks else self.owner


def inner(listeners: list[Listener]) -> list[Listener]:
    """Return the same listeners, marked as those that plans leave out: they prepare other listeners of their callback."""
    for one in listeners:
        one.inner = True
    return listeners


def silent(listeners: list[Listener]) -> list[Listener]:
    """Return the same listeners, marked as silent: see `Listener.silent`."""
    for one in listeners:
        one.silent = True
    return listeners


def nothing(*_: object) -> None:
    """Replace the function of a listener of a disabled callback."""
