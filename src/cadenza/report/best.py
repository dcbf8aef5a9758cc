"""The best value of a metric. The decisions of the run say which direction is better; the name of a metric does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.report.story import Story


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a metric, and which callback judged it."""

    step: int
    value: float
    who: str
    mode: str
    """``"max"`` or ``"min"``."""


def best_of(story: Story, name: str) -> Best | None:
    """Return the best value of a metric; None if no decision says which direction is better, or two disagree."""
    series = story.series.get(name)
    judges = {mode: who for who, mode in _judges(story, name)}
    if series is None or len(judges) != 1:
        return None
    (mode, who), pick = next(iter(judges.items())), {"max": max, "min": min}
    points = [point for point in series.points if math.isfinite(point[1])]
    if not points:
        return None
    step, value = pick[mode](points, key=lambda point: point[1])
    return Best(step, value, who, mode)


def _judges(story: Story, name: str) -> Iterator[tuple[str, str]]:
    """Yield the author and the mode of each decision that judged this metric."""
    for decision in story.decisions:
        best = decision.data.get("best")  # see `Monitor.best_data`; decisions of version 0.1 have no data
        for one in best if isinstance(best, list) else ():
            if isinstance(one, Mapping) and one.get("monitor") == name and one.get("mode") in ("max", "min"):
                yield decision.who, str(one["mode"])
