"""Counts, numbers, durations, sizes and dates as text for people, and lines that fit a terminal."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TextIO


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested mappings, lists and tuples as dicts and lists, with ``leaf(value)`` for each value in them."""
    if isinstance(value, Mapping):
        return {name: mapped(item, leaf) for name, item in value.items()}
    return [mapped(item, leaf) for item in value] if isinstance(value, list | tuple) else leaf(value)


def in_json(value: Any) -> Any:
    """Return plain values for strict JSON: a number that is not finite becomes text, as in ``metrics.jsonl``."""
    return mapped(value, _finite_or_text)


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _finite_or_text(value: Any) -> Any:
    return _NOT_FINITE.get(str(value), value) if isinstance(value, float) else value


def counted(count: int, text: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "point"), counted(2000, "point"), counted(0, "batch")
    ('1 point', '2,000 points', '0 batches')
    """
    return f"{count:,} {text if count == 1 else plural(text)}"


def few(texts: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first texts, and the number of the others.

    >>> few(["a", "b", "c"]), few(["a", "b", "c"], most=2)
    ('a, b, c', 'a, b and 1 more')
    """
    known = list(texts)
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    return separator.join(known[:most]) + more


def plural(text: str) -> str:
    """Return the plural of a noun that follows the rules.

    >>> [plural(one) for one in ("step", "batch", "entry", "epoch", "branch")]
    ['steps', 'batches', 'entries', 'epochs', 'branches']
    """
    if text.endswith("y") and text[-2:-1] not in "aeiou":
        return f"{text[:-1]}ies"
    hissed = text.endswith(("s", "x", "sh", "ch")) and not text.endswith("och")
    return f"{text}es" if hissed else f"{text}s"


def number(value: float, digits: int = 4, grouping: str = "") -> str:
    """Return a number with `digits` significant digits. A whole number below 1e9 keeps all its digits.

    Args:
        value: The number.
        digits: The significant digits of a fraction. A number of more digits before its point keeps these, up to 1e7.
        grouping: What separates thousands: ``","`` or nothing.

    >>> [number(value) for value in (3, 0.00012346, 0.5, 12.3456, 98765.4, 2.5e9, float("nan"))]
    ['3', '0.0001235', '0.5', '12.35', '98765', '2.5e+09', 'nan']
    """
    whole = isinstance(value, int) or (math.isfinite(value) and value == round(value) and abs(value) < 1e9)
    if whole or 10 ** (digits - 1) <= abs(value) < 1e7:
        return f"{value:{grouping}.0f}"
    return f"{value:.{digits}g}"


def precise(value: float) -> str:
    """Return a number for a table: five significant digits, thousands separated.

    >>> [precise(value) for value in (1234567.0, 12345.6, 0.000123456, float("-inf"))]
    ['1,234,567', '12,346', '0.00012346', '-inf']
    """
    return number(value, 5, ",")


def amount(value: float) -> str:
    """Return a quantity of constant width: three digits and a letter for thousands.

    >>> [amount(value) for value in (0.1234, 7, 52.123, 999.9, 1674, 25_300_000)]
    ['0.12', '7.00', '52.1', '1.00k', '1.67k', '25.3M']
    """
    for letter in ("", "k", "M", "G"):
        if abs(value) < 999.5 or letter == "G":
            break
        value /= 1000
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}{letter}"


def short(value: float, digits: int = 4) -> str:
    """Return a number for an axis: no trailing zeros.

    >>> [short(value) for value in (0, 0.25, 1500, 20_000, 3_000_000, 0.00002, -0.1)]
    ['0', '0.25', '1.5k', '20k', '3M', '2e-5', '-0.1']
    >>> short(1_000_002, 7)
    '1.000002M'
    """
    size = abs(value)
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if least <= size < 1e12:
            return f"{value / least:.{digits}g}{letter}"
    if size and not 1e-3 <= size < 1e12:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{digits}g}"


_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))


def clock(seconds: float) -> str:
    """Return a duration of constant width, for text that is refreshed in its place.

    >>> [clock(seconds) for seconds in (12.3, 156, 36_010, 180_000)]
    ['0:12', '2:36', '10:00:10', '2d 2:00:00']
    """
    days, rest = divmod(round(seconds), _DAY)
    hours, minutes, rest = rest // _HOUR, rest % _HOUR // _MINUTE, rest % _MINUTE
    text = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}"
    return f"{days}d {text}" if days else text


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> [duration(seconds) for seconds in (0.000_042, 0.0042, 12.34, 192, 3720, 100_000)]
    ['42 us', '4.2 ms', '12.3 s', '3 min 12 s', '1 h 2 min', '1 d 3 h']
    """
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    size, unit, smaller, less = next(units for units in _UNITS if whole >= units[0])
    return f"{whole // size} {unit} {whole % size // smaller} {less}"


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


def no_formula(cell: Any) -> Any:
    """Return a cell of a CSV file. Text that a spreadsheet would compute as a formula gets a quote before it.

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


def local_date(seconds: float) -> str:
    """Return a time in seconds since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def shown_date(text: object) -> str:
    """Return a time of ``run.json`` as date, time and zone; a text of another form does not change."""
    instant = parsed_date(text)
    return str(text) if instant is None else instant.strftime("%Y-%m-%d %H:%M:%S %z")


def parsed_date(text: object) -> datetime | None:
    """Return a time of ``run.json``; None for a text of another form."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


# -- lines for a terminal: one that is too wide goes on below its beginning, and no number or name is cut

_INDENT = "    "
_LEAST = 20  # columns: a narrower terminal gets lines of this width


def for_screen(text: str, stream: TextIO | None) -> str:
    """Return a text for a stream: unchanged, except that lines that are too wide for a terminal are folded.

    A letter that the stream cannot encode becomes an escape.
    """
    if stream is None:
        return text
    text = encodable(text, stream)
    if not stream.isatty():
        return text
    import shutil  # here, since it imports the modules of archives

    width = shutil.get_terminal_size().columns
    return "\n".join(folded(line, width) for line in text.split("\n"))


def printable(text: str) -> str:
    r"""Return a text without control characters but tabs and ends of lines, so that what a file holds cannot move the cursor.

    >>> printable("loss\n is  \x1b[31mhigh")
    'loss\n is  ?[31mhigh'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def encodable(text: str, stream: TextIO) -> str:
    """Return a text that a stream can encode: in a pipe, the encoding may be ASCII or that of Windows."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def folded(line: str, width: int, separator: str = "  ", indent: str | None = None) -> str:
    """Return a line in as many lines as it needs. It is folded at `separator`, and at spaces where it has none.

    A line with escape sequences, such as colours, is not changed, because its width is not known.

    >>> print(folded("epoch 1  step 50  train/loss 0.4321  12.3 s", 30))
    epoch 1  step 50
        train/loss 0.4321  12.3 s
    """
    width = max(width, _LEAST)
    if len(line) <= width or "\x1b" in line:
        return line
    lead = line[: min(len(line) - len(line.lstrip()), width // 3)]
    indent = lead + _INDENT if indent is None else indent
    first, *parts = line.lstrip().split(separator)
    lines, end = [lead + first], separator.rstrip()
    for part in parts:
        if len(lines[-1]) + len(separator + part + end) <= width:
            lines[-1] += separator + part
        else:
            lines[-1] += end
            lines.append(indent + part.lstrip())
    return "\n".join(row for line in lines for row in _by_spaces(line.rstrip(), width, indent))


def _by_spaces(line: str, width: int, indent: str) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line.lstrip(),
        width,
        initial_indent=line[: len(line) - len(line.lstrip())],
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_on_hyphens=False,
        break_long_words=False,
    )
