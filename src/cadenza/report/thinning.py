"""Long series thinned to the visible resolution. Extreme values are kept."""

from __future__ import annotations

import math
from array import array

from cadenza.report.story import Series


def thinned(series: Series, buckets: int) -> Series:
    """Return the first and the last point, and at most three points in each of `buckets` equal intervals of steps.

    These are the lowest, the highest, and one that is not finite, where the curve has a gap.

    >>> from array import array
    >>> spike = Series(array("q", range(1000)), array("d", [0.0] * 500 + [9.0] + [0.0] * 499))
    >>> list(thinned(spike, 2).points)
    [(0, 0.0), (499, 0.0), (500, 9.0), (999, 0.0)]
    """
    steps, values = series.steps, series.values
    if len(series) <= 2 * buckets:
        return series
    start, interval = steps[0], (steps[-1] - steps[0] + 1) / buckets
    kept = {0, len(steps) - 1}
    low = high = gap = -1
    end = start + interval
    for i, value in enumerate(values):
        if steps[i] >= end:
            kept |= {low, high, gap}
            low = high = gap = -1
            end = start + interval * (math.floor((steps[i] - start) / interval) + 1)
        if not math.isfinite(value):
            gap = i
        else:
            low = i if low < 0 or value <= values[low] else low
            high = i if high < 0 or value > values[high] else high
    kept |= {low, high, gap}
    kept.discard(-1)
    order = sorted(kept)
    return Series(array("q", [steps[i] for i in order]), array("d", [values[i] for i in order]))


def means(series: Series, buckets: int) -> Series:
    """Return the mean of the finite values in each of `buckets` equal intervals of steps, at the middle of its steps.

    A moving average over the extremes that `thinned` keeps would not follow the majority of the values.

    >>> from array import array
    >>> list(means(Series(array("q", range(6)), array("d", [1, 3, 5, float("nan"), 7, 9])), 2).points)
    [(1, 3.0), (4, 8.0)]
    """
    start, interval = series.steps[0], (series.steps[-1] - series.steps[0] + 1) / buckets
    found = Series()
    total, steps, count, inside = 0.0, 0, 0, 0
    for step, value in series.points:
        bucket = int((step - start) / interval)
        if bucket != inside and count:
            found.add(round(steps / count), total / count)
            total, steps, count = 0.0, 0, 0
        inside = bucket
        if math.isfinite(value):
            total, steps, count = total + value, steps + step, count + 1
    if count:
        found.add(round(steps / count), total / count)
    return found
