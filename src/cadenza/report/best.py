"""The best value of a metric. The direction is read from ``run.json`` and the decisions, never guessed from the name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.report.story import Story


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a metric and the callback that watched it."""

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


def best_checkpoints(story: Story) -> dict[str, dict[str, Any]]:
    """Return, for each result, the best checkpoint kept by `Checkpoint`: value, step, checkpoint.

    A decision at the end of a run lists them all. For a killed run, the decisions about each save are used.
    """
    kept: dict[str, dict[str, Any]] = {}
    for decision in story.decisions:
        facts = decision.data.get("best") if decision.what in ("saved", "best kept") else None
        for fact in facts if isinstance(facts, list) else []:
            if isinstance(fact, Mapping) and isinstance(name := fact.get("monitor"), str):
                checkpoint = fact.get("checkpoint", decision.data.get("checkpoint"))
                kept[name] = {"value": fact.get("value"), "step": fact.get("step"), "checkpoint": checkpoint}
    return kept
