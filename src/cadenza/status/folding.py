"""Text for a terminal: a line that is too wide goes on below its beginning, and no number or name is cut."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO

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
    return "\n".join(row for one in lines for row in _by_spaces(one.rstrip(), width, indent))


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
