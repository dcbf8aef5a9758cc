"""The best value of a metric. ``run.json`` and the decisions say which direction is better; the name of a metric does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cadenza.report.story import Story


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a metric, and which callback watched it."""

    step: int
    value: float
    who: str
    mode: str
    """``"max"`` or ``"min"``."""


def best_of(story: Story, name: str) -> Best | None:
    """Return the best value of a metric; None if no callback watched it, or two callbacks disagree on the direction."""
    series = story.series.get(name)
    judges = {mode: who for watched, mode, who in story.watched if watched == name}
    if series is None or len(judges) != 1:
        return None
    (mode, who), pick = next(iter(judges.items())), {"max": max, "min": min}
    points = [point for point in series.points if math.isfinite(point[1])]
    if not points:
        return None
    step, value = pick[mode](points, key=lambda point: point[1])
    return Best(step, value, who, mode)
