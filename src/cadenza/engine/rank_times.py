"""Which rank is the slowest in each part of a step: gathered once, at the end of a run with a profile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from cadenza.drivers.base import Driver
from cadenza.profiling.spans import Profiler
from cadenza.profiling.timings import RankTime, Timings

WAITING = "waiting for ranks"
"""The phase of a profile with the time in which this rank waited for others in methods of its driver."""
_PHASES = {"data": ("fetch", "transfer"), "forward": ("forward",), "backward": ("backward",), "waiting": (WAITING,)}


def measure_waits(driver: Driver, profiler: Profiler) -> Callable[[], object]:
    """Measure as a phase how long the training thread waits in the driver; return a function that ends this."""
    thread = threading.get_ident()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wait(*values: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*values, **named)
            with profiler.timed(WAITING):
                return function(*values, **named)

        return wait

    own = {name: timed(getattr(driver, name)) for name in ("reduce", "gather", "gather_on_main", "broadcast")}
    later = driver.reduce_later
    own["reduce_later"] = lambda value: timed(later(value))
    vars(driver).update(own)

    def end() -> None:
        for name, function in own.items():
            if vars(driver).get(name) is function:
                del vars(driver)[name]

    return end


def rank_times(driver: Driver, timings: Timings) -> tuple[RankTime, ...]:
    """Return the slowest rank of each part of a step, on the main process; nothing on the others. Every rank must call this.

    Each rank sends five numbers, for any number of ranks and phases.
    """
    seconds = {phase.name: phase.seconds for phase in timings.phases}
    own = {part: sum(seconds.get(name, 0.0) for name in names) for part, names in _PHASES.items()}
    own["callbacks"] = sum(one.seconds for one in timings.callbacks)
    everyone = driver.gather_on_main([*own.values()])
    times = []
    for part, values in zip(own, zip(*everyone, strict=True), strict=False):
        slowest = max(range(len(values)), key=values.__getitem__)
        times.append(RankTime(part, slowest, values[slowest], sum(values) / len(values), min(values)))
    return tuple(times)
