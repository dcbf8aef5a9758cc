"""An event of another system and the native hook that calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cadenza.hooks.moments import Moment


@dataclass(frozen=True, slots=True)
class Event:
    """One event of another system.

    Args:
        moment: The native moment that calls it; None if a native run never calls it.
        make: ``make(adapter, hook)`` returns the function that the moment calls. It takes the arguments of the native hook and
            calls `hook` with those of the other system. Since it runs in each step, it should make at most three interpreter
            calls.
        note: A note for the plan and the guide: a difference from the other system, or why the event is never called.
    """

    moment: Moment | None
    make: Callable[[Any, Callable[..., Any]], Callable[..., None]] | None = None
    note: str = ""
