"""Reference pages from docstrings, for `docs/generate.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from ranks import RANKS

SECTION = re.compile(r"^(Args|Raises|Returns|Attributes|Yields):$")
ENTRY = re.compile(r"^    (?P<names>[\w*][\w*., ]*?):\s+(?P<text>.*)$")


def reference(classes: Iterable[type]) -> str:
    """Return a section for each class: signature, description, arguments, example."""
    return "\n".join(section(one) for one in classes)


def section(one: type) -> str:
    """Return the section of a class. Its example is a doctest in the source and is tested there."""
    lines = inspect.cleandoc(one.__doc__ or "").splitlines()
    parts: list[str] = [f"### {one.__name__}\n", f"`{called(one)}`\n"]
    block: list[str] = []
    heading = ""
    for line in [*lines, ""]:
        if (start := SECTION.match(line)) is not None:
            parts += told(heading, block)
            heading, block = start[1], []
        elif line.startswith(">>> ") and heading != "example":
            parts += told(heading, block)
            heading, block = "example", [line]
        else:
            block.append(line)
    ranks = [f"On several ranks: {RANKS[one.__name__]}\n"] if one.__name__ in RANKS else []
    return "\n".join([*parts, *told(heading, block), *ranks])


def told(heading: str, block: list[str]) -> list[str]:
    """Return a part of a docstring as Markdown."""
    text = "\n".join(block).strip("\n")
    if not text:
        return []
    if heading == "example":
        shown = re.sub(r"\s+# doctest: \S+", "", text)
        return [f"```pycon\n{shown}\n```\n"]
    if heading in ("Args", "Raises", "Returns", "Attributes", "Yields"):
        title = {"Args": "Arguments"}.get(heading, heading)
        return [f"{title}:\n", *entries(block), ""]
    return [re.sub(r"``(.+?)``", r"`\1`", text) + "\n"]


def entries(block: list[str]) -> list[str]:
    """Return the entries of a section as a list, with continuation lines joined."""
    rows: list[str] = []
    for line in block:
        if (entry := ENTRY.match(line)) is not None:
            rows.append(f"- `{entry['names']}`: {entry['text']}")
        elif line.strip() and rows:
            rows[-1] += f" {line.strip()}"
        elif line.strip():
            rows.append(f"- {line.strip()}")
    return [re.sub(r"``(.+?)``", r"`\1`", row) for row in rows]


def called(one: type) -> str:
    """Return the signature of a class: names and defaults, without types."""
    shown = []
    star = False
    for parameter in inspect.signature(one).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        name = f"*{parameter.name}" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name
        star |= parameter.kind is parameter.VAR_POSITIONAL
        shown.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    return f"{one.__name__}({', '.join(shown)})"


def counterparts(table: dict[str, dict[str, str]]) -> str:
    """Return the table of other systems' built-in callbacks and their native equivalents."""
    rows = ["| system | built-in callback | native equivalent |", "|---|---|---|"]
    for system, built_ins in table.items():
        rows += [f"| {system} | `{name}` | `{native}` |" for name, native in built_ins.items()]
    return "\n".join(rows) + "\n"
