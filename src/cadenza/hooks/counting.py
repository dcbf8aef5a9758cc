"""What the schedules of a moment count: its own counter, and the units that are under way when it fires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Own = Literal["epoch", "step", "batch", "time"]

NONE: frozenset[str] = frozenset()
BATCH = frozenset(("epoch", "step", "batch", "sample", "token"))
"""Under way at a moment before the end of a batch."""
STEP = frozenset(("epoch", "step"))
"""Under way at a moment after a batch and before the end of its step."""


@dataclass(frozen=True, slots=True)
class Counting:
    """How the schedules of a moment count."""

    unit: Own = "step"
    """What a bare number counts; ``"time"``: how often the moment fired in the run."""

    under_way: frozenset[str] = NONE
    """The units that are not complete when the moment fires: the 3rd step starts when 2 are complete."""

    begun: bool = False
    """Whether the moment also fires for a unit that is never complete: an epoch that ``max_steps`` ends."""

    main_only: bool = False
    """Whether the moment fires on the main process only."""

    paired: bool = False
    """Whether the schedule has a listener at the end of steps and one at the end of epochs. Then each pulse belongs to one."""

    part: bool = False
    """Whether the schedule is a part of another one."""

    def as_part(self) -> Counting:
        """Return the same for a part of the schedule."""
        return replace(self, part=True)

    def as_paired(self) -> Counting:
        """Return the same for one of two listeners."""
        return replace(self, paired=True)


STEP_END = Counting("step")
EPOCH_END = Counting("epoch")
_UNCOUNTED = Counting("time")
_OF_MOMENTS: dict[Callable[..., None], Counting] = {}


def set_counting(moment: Callable[..., None], counting: Counting) -> None:
    """Set how the schedules of a moment count."""
    _OF_MOMENTS[moment] = counting


def counting_of(moment: Callable[..., None]) -> Counting:
    """Return how the schedules of a moment count. Without a counter, they count how often it fired in the run.

    >>> from cadenza import Callback
    >>> counting_of(Callback.on_batch_end).unit, counting_of(Callback.on_eval_end).unit
    ('batch', 'time')
    """
    return _OF_MOMENTS.get(moment, _UNCOUNTED)
