"""Numbers, times and sizes as the report shows them."""

from __future__ import annotations

import math
import time
from datetime import datetime


def number(value: float) -> str:
    """Return a value with five significant digits, whole numbers with all.

    >>> [number(value) for value in (3, 1234567, 0.000123456, 0.5, float("nan"), float("-inf"))]
    ['3', '1,234,567', '0.00012346', '0.5', 'NaN', '-Infinity']
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.5g}"


def short(value: float) -> str:
    """Return a number for an axis.

    >>> [short(value) for value in (0, 0.25, 1500, 20_000, 3_000_000, 0.00002, -0.1)]
    ['0', '0.25', '1.5k', '20k', '3M', '2e-5', '-0.1']
    """
    size = abs(value)
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if least <= size < 1e12:
            return f"{value / least:.4g}{letter}"
    if size and not 1e-3 <= size < 1e12:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    >>> [duration(seconds) for seconds in (0.000_042, 0.0042, 12.34, 192, 3720, 100_000)]
    ['42 us', '4.2 ms', '12.3 s', '3 min 12 s', '1 h 2 min', '1 d 3 h']
    """
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {less}"
    raise AssertionError(seconds)


def size(count: float) -> str:
    """Return a number of bytes.

    >>> [size(count) for count in (120, 34_500, 1.5e9)]
    ['120 B', '34.5 kB', '1.5 GB']
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def times(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun.

    >>> times(1, "point"), times(2000, "point"), times(0, "entry", "entries")
    ('1 point', '2,000 points', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def moment(seconds: float) -> str:
    """Return a time since 1970 as date and time of this place."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def written(text: object) -> str:
    """Return a time of ``run.json`` without its letters; what is none as it is."""
    instant = parsed(text)
    return str(text) if instant is None else instant.strftime("%Y-%m-%d %H:%M:%S %z")


def parsed(text: object) -> datetime | None:
    """Return a time of ``run.json``; None if it is none."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None
