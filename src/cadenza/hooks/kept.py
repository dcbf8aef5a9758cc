"""What a checkpoint holds of the schedules: the rest follows from the counters of the run.

- Pulses that wait for their moment: 500 steps are complete inside an epoch, and their listener is called at its end.
- How often a moment without a counter fired, such as ``on_eval_end``.
- Which listeners were called for a fetch that found the loader empty: the batch that they count is still to come.
- Which listeners at the end of steps were called in the last step: their twins are not called again at the end of its epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.hooks.listener import Listener
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.hooks.dispatch import Hooks


def kept_of(hooks: Hooks, at: Progress, accumulate: int) -> dict[str, Any]:
    """Return this part of the state of the listeners, as plain data."""
    waiting, past = list[str](), list[str]()
    called: list[str] = []
    times: dict[str, int] = {}
    for key, listener in _scheduled(hooks):
        for index, part in enumerate(listener.timer.parts() if listener.timer else ()):
            if part.waits(at, accumulate):
                waiting.append(f"{key}, {index}")
            if part.is_past(at):
                past.append(f"{key}, {index}")
            if part.counts_times:
                times[listener.moment.__name__] = part.times
        if listener.last_step == at.step:
            called.append(key)
    return {"waiting": waiting, "past": past, "called": called, "times": times}


def restore(hooks: Hooks, kept: Mapping[str, Any], at: Progress) -> None:
    """Restore this part of the state of the listeners. Listeners that were not there have none."""
    waiting, past, called = (set(kept.get(name, ())) for name in ("waiting", "past", "called"))
    for key, listener in _scheduled(hooks):
        for index, part in enumerate(listener.timer.parts() if listener.timer else ()):
            if f"{key}, {index}" in waiting:
                part.make_due(at)
            if f"{key}, {index}" in past:
                part.make_past(at)
            if part.counts_times:
                part.add_times(kept.get("times", {}).get(listener.moment.__name__, 0))
        if key in called:
            listener.last_step = at.step


def _scheduled(hooks: Hooks) -> Iterator[tuple[str, Listener]]:
    """Yield each listener with a schedule, with a key that is the same in any process."""
    for moment, listeners in hooks.by_moment.items():
        seen: dict[str, int] = {}
        for listener in listeners:
            if listener.timer is not None:
                name = f"{listener.owner}, {moment.__name__}, {listener.schedule}"
                seen[name] = seen.get(name, 0) + 1
                yield f"{name}, {seen[name]}", listener
