"""Output of the commands: lines, tables that fit the terminal, one-line curves, JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from cadenza.status.formats import folded, in_json, printable

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def add_json(parser: argparse.ArgumentParser, text: str = "print JSON, with all there is, for another program") -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def say(line: str = "") -> None:
    """Print a line. Characters that the terminal's encoding does not have, and control characters, are replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(f"{printable(line)}\n".encode(encoding, errors="replace").decode(encoding))


def complain(line: str) -> None:
    """Print a line to stderr about a problem that does not end the command."""
    sys.stderr.write(f"cadenza: {printable(line)}\n")


def say_folded(line: str, separator: str, indent: str | None = None) -> None:
    """Print a line, wrapped at the width of the terminal; see `folded`."""
    most = width()
    say(line if most is None else folded(line, most, separator, indent))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print strict JSON: a number that is not finite becomes text, ``"NaN"`` or ``"-Infinity"``, as in ``metrics.jsonl``."""
    sys.stdout.write(json.dumps(in_json(value), indent=indent, default=str) + "\n")


def width() -> int | None:
    """Return the columns of the terminal, or of the variable ``COLUMNS``; None if stdout has no width to fit."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        import shutil  # here, since it imports the modules of archives

        return shutil.get_terminal_size().columns
    return None


def print_rows(rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int] = frozenset(), fit: bool = False) -> None:
    """Print rows as aligned columns.

    Args:
        rows: The cells of each row. All rows have equal lengths.
        right: The indices of right-aligned columns, for numbers.
        fit: Truncate lines at the width of the terminal.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(columns_of, column)) for column in zip(*cells, strict=True)]
    most = width() if fit else None
    for row in cells:
        padded = [_padded(cell, wide, i in right) for i, (cell, wide) in enumerate(zip(row, widths, strict=True))]
        line = "  ".join(padded).rstrip()
        say(line if most is None else cut(line, most))


def fitting(rows: Sequence[Sequence[str]], first: int) -> list[int]:
    """Return the indices of the columns that the terminal has room for: the first ones, then each that still fits."""
    most = width()
    widths = [max(columns_of(clean(cell)) for cell in column) for column in zip(*rows, strict=True)]
    kept, used = [*range(first)], sum(widths[:first]) + 2 * (first - 1)
    for i in range(first, len(widths)):
        if most is None or used + 2 + widths[i] <= most:
            kept.append(i)
            used += 2 + widths[i]
    return kept


def clean(text: str) -> str:
    r"""Return a text as one line without control characters, so that file contents cannot move the cursor.

    >>> clean("loss\n is  \x1b[31mhigh")
    'loss is ?[31mhigh'
    """
    return printable(" ".join(text.split()))


def columns_of(text: str) -> int:
    """Return the width of a text in terminal columns; wide characters count as two."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, most: int) -> str:
    """Truncate a text to `most` columns, ending in three dots if it was cut.

    >>> cut("a long name", 8), cut("short", 8)
    ('a lon...', 'short')
    """
    if columns_of(text) <= most:
        return text
    while text and columns_of(text) > max(most - 3, 0):
        text = text[:-1]
    return (text + "...")[:most]


def cut_at_start(text: str, most: int) -> str:
    """Truncate a name to `most` columns at its start, since paths of runs differ at their ends.

    >>> cut_at_start("a/long/path", 8)
    '.../path'
    """
    return cut(text[::-1], most)[::-1]


def curve(values: Sequence[float], most: int) -> str:
    """Return a one-line curve: the mean of each interval, scaled from lowest to highest. NaN is a space.

    >>> curve([1, 2, 3, 4, 3, 2, 1, float("nan")], 8)
    '▁▃▆█▆▃▁ '
    """
    parts = min(most, len(values))
    means = [_mean(values[i * len(values) // parts : (i + 1) * len(values) // parts]) for i in range(parts)]
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low if math.isfinite(high - low) else 0.0
    bars = BARS if _can_print(BARS) else ASCII_BARS
    middle = len(bars) // 2
    levels = [round((value - low) / span * (len(bars) - 1)) if span else middle for value in finite]
    drawn = iter(levels)
    return "".join(bars[next(drawn)] if math.isfinite(value) else " " for value in means)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _padded(cell: str, wide: int, right: bool) -> str:
    space = " " * (wide - columns_of(cell))
    return space + cell if right else cell + space
