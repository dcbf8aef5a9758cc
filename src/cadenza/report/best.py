"""The best value of a metric. ``run.json`` and the decisions say which direction is better; the name of a metric does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    """Yield the name and the mode of each callback that watched this metric: as it started, and as it decided."""
    found = [(one.get("callback"), one) for one in _mappings(story.info.get("monitors"))]
    # See `Monitor.best_data`. Monitors of adapters are known from decisions only. Version 0.1 wrote neither.
    found += [(decision.who, one) for decision in story.decisions for one in _mappings(decision.data.get("best"))]
    for who, one in found:
        if one.get("monitor") == name and one.get("mode") in ("max", "min"):
            yield str(who), str(one["mode"])


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
