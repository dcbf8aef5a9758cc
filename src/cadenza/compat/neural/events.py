"""The table that maps the events of NeMo to native moments, for both versions."""

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
    """One of NeMo's eight events: its native moment, and its counters."""

    moment: Moment
    ends_step: bool = False
    """Whether its step is complete, so that the index of the step is one less than the number of completed steps."""
    ends_epoch: bool = False
    """Whether its epoch has just ended."""
    live: bool = False
    """Whether the tensors of a batch can be read."""
    all_over: bool = False
    """Whether the training has ended."""


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
    """Yield the listeners of `hooks`: by event, a function of the native run, the adapted run and the event."""
    for name, hook in hooks.items():
        yield Listener(EVENTS[name].moment, _listener(name, hook))
        if name == "on_batch_end":
            # A skipped batch, or one without backward in a step_fn, has its end, too.
            yield Listener(Callback.on_batch_end, _listener(name, hook, only_missing=True))


def _listener(name: str, hook: Callable[[Run, AdaptedRun, str], object], *, only_missing: bool = False) -> Callable[..., None]:
    event = EVENTS[name]

    def call(run: Run, *_: Any) -> None:
        if name.endswith("_end") and unwinding(run) is not None:
            return  # in NeMo nothing is called after an error
        adapted = AdaptedRun.of(run)
        if name == "on_batch_end" and not adapted.first_end(hook, missing=only_missing):
            return
        adapted.live = event.live
        try:
            hook(run, adapted, name)
        finally:
            adapted.live = False

    return call


def counters(adapted: AdaptedRun, name: str) -> tuple[int, int]:
    """Return the step and the epoch of an event."""
    event = EVENTS[name]
    epoch = adapted.epoch(ended=event.ends_epoch or event.all_over) - event.ends_epoch
    return adapted.step(ending=event.ends_step), epoch
