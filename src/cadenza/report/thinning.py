"""Downsampling of long series that keeps extreme values, and the smoothed mean of noisy series."""

from __future__ import annotations

from array import array
from typing import Any

import numpy

from cadenza.report.story import Series

Numbers = numpy.ndarray[Any, numpy.dtype[Any]]
FEWEST = 30
"""Minimum number of finite values of a noisy series."""


def thinned(series: Series, buckets: int) -> Series:
    """Return the first and the last point, and at most three points in each of `buckets` equal intervals of steps.

    These are the lowest, the highest, and a non-finite one, where the curve has a gap.

    >>> from array import array
    >>> spike = Series(array("q", range(1000)), array("d", [0.0] * 500 + [9.0] + [0.0] * 499))
    >>> list(thinned(spike, 2).points)
    [(0, 0.0), (499, 0.0), (500, 9.0), (999, 0.0)]
    """
    if len(series) <= 2 * buckets:
        return series
    steps, values = _arrays(series)
    starts = _starts(series, buckets)
    bucket = numpy.repeat(numpy.arange(len(starts)), _lengths(starts, len(steps)))
    finite = numpy.isfinite(values)
    lowest = numpy.minimum.reduceat(numpy.where(finite, values, numpy.inf), starts)
    highest = numpy.maximum.reduceat(numpy.where(finite, values, -numpy.inf), starts)
    kept = [
        numpy.array([0, len(steps) - 1]),
        _last_of_each(finite & (values == lowest[bucket]), bucket),
        _first_of_each(finite & (values == highest[bucket]), bucket),
        _last_of_each(~finite, bucket),
    ]
    order = numpy.unique(numpy.concatenate(kept))
    return _series(steps[order], values[order])


def noisy(series: Series) -> bool:
    """Return whether the values scatter around a curve, so that a smoothed mean shows more than the raw line.

    A series is noisy if a quarter of its values are turning points (two thirds are in pure noise), and its changes from value
    to value are not small: the ratio of von Neumann, half of their mean square by the variance, is above 0.01 (in noise, 1).

    >>> import math, random
    >>> chance, decay = random.Random(1), [math.exp(-i / 50) for i in range(200)]
    >>> def series_of(values):
    ...     return Series(array("q", range(len(values))), array("d", values))
    >>> noisy(series_of(decay)), noisy(series_of([value + chance.gauss(0, 0.1) for value in decay]))
    (False, True)
    """
    _, values = _arrays(series)
    values = values[numpy.isfinite(values)]
    if len(values) < FEWEST:
        return False
    largest = numpy.abs(values).max()
    values = values / largest if largest > 0 else values  # so that no square overflows
    ahead = numpy.diff(values)
    moves = numpy.sign(ahead[ahead != 0])
    turning = (moves[1:] != moves[:-1]).sum() / len(values)
    variance = values.var()
    return bool(turning >= 0.25 and variance > 1e-18 and (ahead**2).mean() / 2 > 0.01 * variance)


def window(count: int) -> int:
    """Return the smoothing window of a noisy series of `count` finite values: odd, a 20th of them, at least 5."""
    return max(5, count // 20) | 1


def trend(series: Series, most: int) -> Series:
    """Return the mean of the finite values around each point, at no more than `most` points. See `window`.

    The mean is centred, so unlike an exponential mean it does not lag. At both ends it averages fewer values.
    """
    steps, values = _arrays(series)
    finite = numpy.isfinite(values)
    steps, values = steps[finite], values[finite]
    at = numpy.unique(numpy.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))
    half, largest = window(len(values)) // 2, numpy.abs(values).max() or 1.0
    values = values / largest  # so that no sum overflows
    middle = values[len(values) // 2]
    sums = numpy.concatenate([[0.0], numpy.cumsum(values - middle)])
    first, last = numpy.maximum(at - half, 0), numpy.minimum(at + half + 1, len(values))
    return _series(steps[at], ((sums[last] - sums[first]) / (last - first) + middle) * largest)


def _arrays(series: Series) -> tuple[Numbers, Numbers]:
    return numpy.frombuffer(series.steps, numpy.int64), numpy.frombuffer(series.values, numpy.float64)


def _series(steps: Numbers, values: Numbers) -> Series:
    return Series(array("q", steps.astype(numpy.int64).tobytes()), array("d", values.astype(numpy.float64).tobytes()))


def _starts(series: Series, buckets: int) -> Numbers:
    """Return the index of the first point in each non-empty interval."""
    steps, _ = _arrays(series)
    interval = (series.steps[-1] - series.steps[0] + 1) / buckets
    bucket = numpy.minimum((steps - steps[0]) / interval, buckets - 1).astype(numpy.int64)
    return numpy.concatenate([[0], numpy.flatnonzero(numpy.diff(bucket)) + 1])


def _lengths(starts: Numbers, count: int) -> Numbers:
    return numpy.diff(numpy.append(starts, count))


def _first_of_each(chosen: Numbers, bucket: Numbers) -> Numbers:
    found = numpy.flatnonzero(chosen)
    first: Numbers = found[numpy.diff(bucket[found], prepend=-1) != 0]
    return first


def _last_of_each(chosen: Numbers, bucket: Numbers) -> Numbers:
    found = numpy.flatnonzero(chosen)
    last: Numbers = found[numpy.diff(bucket[found], append=-1) != 0]
    return last
