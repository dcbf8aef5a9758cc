"""The best value of a metric. ``run.json`` and the decisions say which direction is better; the name of a metric does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    judges = {mode: who for watched, mode, who in story.watched if watched == name}
    if series is None or len(judges) != 1:
        return None
    (mode, who), pick = next(iter(judges.items())), {"max": max, "min": min}
    points = [point for point in series.points if math.isfinite(point[1])]
    if not points:
        return None
    step, value = pick[mode](points, key=lambda point: point[1])
    return Best(step, value, who, mode)


def kept_in(story: Story) -> dict[str, dict[str, Any]]:
    """Return, by the result, the best checkpoint that `Checkpoint` kept: value, step, checkpoint.

    At the end of a run one decision has them all; of a run that was killed, those about each save are known.
    """
    kept: dict[str, dict[str, Any]] = {}
    for decision in story.decisions:
        facts = decision.data.get("best") if decision.what in ("saved", "best kept") else None
        for one in facts if isinstance(facts, list) else []:
            if isinstance(one, Mapping) and isinstance(name := one.get("monitor"), str):
                checkpoint = one.get("checkpoint", decision.data.get("checkpoint"))
                kept[name] = {"value": one.get("value"), "step": one.get("step"), "checkpoint": checkpoint}
    return kept
