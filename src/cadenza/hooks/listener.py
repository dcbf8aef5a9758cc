"""What is called at a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cadenza.hooks.cadence import Filter


@dataclass(slots=True, eq=False)
class Listener:
    """One function that is called at one moment, perhaps not every time."""

    moment: Callable[..., None]
    """The entry of the table, such as ``Callback.on_step_end``."""

    function: Callable[..., Any]
    """Called with the moment's arguments; what it returns is ignored."""

    filter: Filter | None = None
    """Asked at each firing whether to call the function; None calls it always."""

    note: str = ""
    """What the plan shall say beside it, such as a limit."""

    owner: str = ""
    """The callback's name in the run; given by `Hooks`."""

    calls: int = 0
    """How often the filter let a call through in this run."""

    def bound(self) -> Callable[..., Any]:
        """Return what a run calls at the moment: the function itself, or behind a fresh gate."""
        if self.filter is None:
            return self.function
        function = self.function

        def counted(run: Any, *rest: Any) -> None:
            self.calls += 1
            function(run, *rest)

        return self.filter.gated(counted)

    def __str__(self) -> str:
        remarks = ", ".join(str(remark) for remark in (self.filter, self.note) if remark)
        return f"{self.owner} ({remarks})" if remarks else self.owner
