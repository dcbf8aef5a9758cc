"""Axes of charts: limits, round ticks, and distinct labels that fit. script/axes.js implements the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

from cadenza.status.formats import short

CHARACTER = 7
"""The width of a digit in a label, in pixels, rounded up."""
_DIGITS = 7
"""Labels that need more digits than this are shown as offsets from the first label."""


class Scale:
    """Maps numbers to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low: float = low
        self.high: float = high
        self.start: float = start
        self._half = (high / 2 - low / 2) or 1.0  # halved, since the difference of two floats may overflow
        self._pixels = end - start

    def __call__(self, value: float) -> str:
        return f"{self.start + (value / 2 - self.low / 2) / self._half * self._pixels:.1f}".removesuffix(".0")


def padded(low: float, high: float) -> tuple[float, float]:
    """Return the limits of an axis, slightly beyond the values. A constant line is centred."""
    spread = high / 2 - low / 2
    # smaller differences are rounding errors
    room = spread * 0.1 if spread > 5e-10 * max(abs(low), abs(high)) else abs(high) * 0.1 or 1.0
    largest = sys.float_info.max
    return max(low - room, -largest), min(high + room, largest)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`.

    >>> ticks(0.03, 0.98, 4), ticks(0, 1200, 3)
    ([0.2, 0.4, 0.6, 0.8], [0.0, 500.0, 1000.0])
    """
    rough = (high / 2 - low / 2) / count * 2
    if not (math.isfinite(rough) and rough > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.7), 0.0)
    if not (math.isfinite(step) and step > 0):
        return [low]
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, min(digits, 300)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def labels(values: Sequence[float]) -> tuple[list[str], str]:
    """Return a label for each tick, all different, and the offset that they are relative to, empty if none is needed.

    >>> labels([0.0, 500.0, 1000.0]), labels([1.0000001, 1.0000002])
    ((['0', '500', '1k'], ''), (['+0', '+1e-7'], '1.0000001'))
    """
    apart = min((abs(after - before) for before, after in pairwise(values)), default=0.0)
    if not 0 < apart < math.inf:
        return [short(value) for value in values], ""
    digits = math.floor(math.log10(max(map(abs, values)) / apart) + 1e-9) + 2
    if digits > _DIGITS:
        return [f"+{short(value - values[0])}" for value in values], f"{values[0]:.15g}"
    return [short(value, max(4, digits)) for value in values], ""


def room_for(texts: Sequence[str]) -> int:
    """Return the width in pixels of a vertical axis's labels, including the gap to the axis."""
    return max(44, CHARACTER * max(map(len, texts), default=0) + 12)
