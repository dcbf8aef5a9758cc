"""What is called at a moment, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cadenza.hooks.schedule import Schedule, Timer

if TYPE_CHECKING:
    from cadenza.profiling.spans import Span
    from cadenza.run import Run


@dataclass(slots=True, eq=False)
class Listener:
    """One function that is called at one moment, on a schedule or each time."""

    moment: Callable[..., None]
    """The entry of the table, such as ``Callback.on_step_end``."""

    function: Callable[..., Any]
    """Called with the moment's arguments; what it returns is ignored."""

    schedule: Schedule | None = None
    """When to call it; None calls it each time."""

    note: str = ""
    """A remark for the plan, such as a limit."""

    asks: bool | None = None
    """Whether the function may log, or ask the run for anything; None takes `Callback.asks` of its callback."""

    owner: str = ""
    """The callback's name in the run; given by `Hooks`."""

    calls: int = 0
    """How often a schedule was due in this run."""

    # -- in a run, for the dispatch ----------------------------------------------------------------

    call: Callable[..., Any] = field(init=False, repr=False)
    """What the moment calls: the function, or the function if it is due; `nothing` if its callback is disabled."""

    timer: Timer | None = field(init=False, default=None, repr=False)
    """The state of the schedule."""

    next_step: float = field(init=False, default=0, repr=False)
    """How many steps are complete when it must be called again; see `Timer.next_step`."""

    span: Span | None = field(init=False, default=None, repr=False)
    """Its time, in a run with a profile."""

    def begin(self, owner: str) -> None:
        """Belong to a run that begins."""
        self.owner, self.call, self.timer, self.span = owner, self.function, None, None
        self.calls, self.next_step = 0, 0
        if self.schedule is None:
            return
        timer, function = self.schedule.timer(), self.function

        def call_if_due(run: Run, *values: Any) -> None:
            if timer.due(run):
                self.calls += 1
                function(run, *values)

        self.timer, self.call = timer, call_if_due

    def __str__(self) -> str:
        remarks = ", ".join(str(remark) for remark in (self.schedule, self.note) if remark)
        return f"{self.owner} ({remarks})" if remarks else self.owner


def nothing(*_: object) -> None:
    """Be called in place of a listener whose callback is disabled."""
