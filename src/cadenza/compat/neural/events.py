"""How hooks of the NeMo dialects are placed on the native moments: one table for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass(frozen=True, slots=True)
class Event:
    """One of NeMo's eight events: where it takes place, and what it counts."""

    moment: Moment
    ends_step: bool = False
    """Whether the step that it speaks of is complete, so that its number is one less than the steps done."""
    ends_epoch: bool = False
    """Whether the epoch that it speaks of has just ended."""
    live: bool = False
    """Whether the tensors of a batch can be asked for."""
    all_over: bool = False
    """Whether the training is over."""


EVENTS = {
    "on_action_start": Event(Callback.on_fit_start),
    "on_epoch_start": Event(Callback.on_epoch_start),
    "on_step_start": Event(Callback.on_step_start),
    "on_batch_start": Event(Callback.on_batch_start, live=True),
    "on_batch_end": Event(Callback.on_after_backward, live=True),
    "on_step_end": Event(Callback.on_step_end, ends_step=True, live=True),
    "on_epoch_end": Event(Callback.on_epoch_end, ends_epoch=True),
    "on_action_end": Event(Callback.on_fit_end, all_over=True),
}


def listeners(hooks: dict[str, Callable[[Run, AdaptedRun, str], object]]) -> Iterator[Listener]:
    """Yield what hears the events: for each event's name a function of the native run, the adapted run and the name."""
    for name, hook in hooks.items():
        yield Listener(EVENTS[name].moment, _placed(name, hook))
        if name == "on_batch_end":
            # A batch that was skipped, or that a step_fn left without backward, has its end all the same.
            yield Listener(Callback.on_batch_end, _placed(name, hook, only_missing=True))


def _placed(name: str, hook: Callable[[Run, AdaptedRun, str], object], *, only_missing: bool = False) -> Callable[..., None]:
    event = EVENTS[name]

    def hear(run: Run, *_: Any) -> None:
        if name.endswith("_end") and unwinding() is not None:
            return  # in NeMo nothing is called after an error
        adapted = AdaptedRun.of(run)
        if name == "on_batch_end" and not adapted.first_end(hook, missing=only_missing):
            return
        adapted.live = event.live
        try:
            hook(run, adapted, name)
        finally:
            adapted.live = False

    return hear


def counters(adapted: AdaptedRun, name: str) -> tuple[int, int]:
    """Return step and epoch as an event sees them."""
    event = EVENTS[name]
    epoch = adapted.epoch(ended=event.ends_epoch or event.all_over) - event.ends_epoch
    return adapted.step(ending=event.ends_step), epoch
