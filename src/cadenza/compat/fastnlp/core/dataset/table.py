"""Text tables of rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import east_asian_width

SIZE = (144, 11)  # columns and lines without a terminal, such as in a notebook


def table_of(names: Sequence[str], rows: Iterable[Mapping[str, Any]], *, rows_shown: int | None = None) -> str:
    """Return a table with a line for each row. Long cells are cut off.

    Args:
        names: The columns.
        rows: The cells by name.
        rows_shown: The number of rows before a row of dots; None: one more than the lines of the terminal.

    >>> print(table_of(["words", "target"], [{"words": [5, 283], "target": 0}]))
    +----------+--------+
    | words    | target |
    +----------+--------+
    | [5, 283] | 0      |
    +----------+--------+
    """
    columns, lines = _terminal_size()
    rows_shown = lines + 1 if rows_shown is None else rows_shown
    if not names:
        return "+--+\n+--+"
    cells = [list(names)]
    for number, row in enumerate(rows):
        if number == rows_shown:
            cells.append(["..."] * len(names))
            break
        cells.append([_cut(str(row[name]), max(columns // len(names) // 2, len(name))) for name in names])
    return "\n".join(_lines(cells))


def _terminal_size() -> tuple[int, int]:
    try:
        return os.get_terminal_size()
    except OSError:
        return SIZE


def _cut(text: str, limit: int) -> str:
    """Return `text`; if it is wider than `limit` columns, cut it after the first character beyond and add dots."""
    width = 0
    for index, character in enumerate(text):
        width += _width(character)
        if width > limit:
            return text[: index + 1] + "..."
    return text


def _lines(cells: list[list[str]]) -> Iterator[str]:
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    yield rule
    for number, row in enumerate(cells):
        yield "|" + "|".join(f" {cell}{' ' * (width - _width(cell))} " for cell, width in zip(row, widths, strict=True)) + "|"
        if number == 0:
            yield rule
    yield rule


def _width(text: str) -> int:
    """Return the number of columns of a text; a Chinese character has two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)
