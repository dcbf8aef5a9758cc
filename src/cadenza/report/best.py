"""Which value was the best, where somebody in the run decided it: the name of a metric does not say which way is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.report.story import Series, Story

# Who says what: Checkpoint(keep_best=...), EarlyStopping, BestWeights.
_SENTENCES = (
    re.compile(r"(?:step-(?P<step>\d+)\S*: )?(?P<name>.+) is (?P<value>\S+), the best so far"),
    re.compile(r"'(?P<name>.+)' did not get better than (?P<value>\S+) in .+"),
    re.compile(r"the weights of step (?P<step>\d+): (?P<name>.+) was (?P<value>\S+)"),
)


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a name, and on whose word."""

    step: int
    value: float
    who: str
    mode: str
    """``"max"`` or ``"min"``, as far as the decisions give it away; else empty."""


def best_of(story: Story, name: str) -> Best | None:
    """Return the best value of a name; None if nobody in the run decided which way is better."""
    series = story.series.get(name)
    said = [(who, found) for who, key, value, step in _said(story) if key == name if (found := _place(series, value, step))]
    if series is None or not said:
        return None
    up, down = (all(_beats(series, found, sign) for _, found in said) for sign in (1, -1))
    who, (step, value) = said[-1]
    if up == down:  # a first value alone was ever the best: it is what was decided, and no more is known
        return Best(step, value, who, "")
    pick = max if up else min
    step, value = pick((point for point in series.points if math.isfinite(point[1])), key=lambda point: point[1])
    return Best(step, value, who, "max" if up else "min")


def _said(story: Story) -> Iterator[tuple[str, str, str, int | None]]:
    """Yield who called which name's value the best, the value as it was written, and the step if that was said."""
    reasons = [
        (decision.who, decision.why) for decision in story.decisions if decision.what in ("saved", "stopped", "restored")
    ]
    kept = [("Checkpoint", f"{kept.name}: {kept.facts.get('reason')}") for kept in story.checkpoints]
    for who, why in reasons + kept:
        for sentence in _SENTENCES:
            if match := sentence.fullmatch(why):
                parts = match.groupdict()
                yield who, parts["name"], parts["value"], int(parts["step"]) if parts.get("step") else None


def _place(series: Series | None, written: str, step: int | None) -> tuple[int, float] | None:
    """Return the first point with this value, at the step if one is known."""
    for at, value in series.points if series else ():
        if f"{value:g}" == written and step in (None, at):
            return at, value
    return None


def _beats(series: Series, found: tuple[int, float], sign: int) -> bool:
    """Return whether a value is above (below, with `sign` -1) all that came before it."""
    return all(sign * value < sign * found[1] for step, value in series.points if step < found[0] and math.isfinite(value))
