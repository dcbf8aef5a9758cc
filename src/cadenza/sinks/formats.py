"""Numbers and times as people read them: short, and of like width."""

from __future__ import annotations

from typing import Any


def number(value: float, digits: int = 4) -> str:
    """Return `value` with so many significant digits; whole numbers as they are.

    >>> [number(value) for value in (3, 0.00012346, 0.5, 12.3456, 98765.4, 2.5e9, float("nan"))]
    ['3', '0.0001235', '0.5', '12.35', '98765', '2.5e+09', 'nan']
    """
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if 10 ** (digits - 1) <= abs(value) < 10**7 else f"{value:.{digits}g}"


def amount(value: float) -> str:
    """Return a quantity in three digits and a letter for thousands.

    >>> [amount(value) for value in (0.1234, 7, 52.123, 999.9, 1674, 25_300_000)]
    ['0.12', '7.00', '52.1', '1.00k', '1.67k', '25.3M']
    """
    for letter in ("", "k", "M", "G"):
        if abs(value) < 999.5 or letter == "G":
            break
        value /= 1000
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}{letter}"


def duration(seconds: float) -> str:
    """Return a time by the clock.

    >>> [duration(seconds) for seconds in (12.3, 156, 36_010, 180_000)]
    ['0:12', '2:36', '10:00:10', '2d 2:00:00']
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    clock = f"{h}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
    return f"{days}d {clock}" if days else clock


def no_formula(cell: Any) -> Any:
    """Return a cell of a CSV file so that spreadsheets show a text and do not compute it; numbers stay as they are.

    >>> no_formula("=1+1"), no_formula("-0.5"), no_formula("accuracy"), no_formula(-0.5)
    ("'=1+1", '-0.5', 'accuracy', -0.5)
    """
    if not isinstance(cell, str) or not (cell.startswith(("\t", "\r")) or cell.lstrip().startswith(("=", "+", "-", "@"))):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
