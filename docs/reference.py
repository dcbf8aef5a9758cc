"""Reference pages from docstrings, for `docs/generate.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from purposes import EXPLAINED, PURPOSES, RELATED
from ranks import RANKS

SECTION = re.compile(r"^(Args|Raises|Returns|Attributes|Yields):$")


def contents(classes: Iterable[type]) -> str:
    """Return a table of links with the first sentence of each class, grouped by purpose."""
    left = {one.__name__: one for one in classes}
    rows = ["| | what it does |", "|---|---|"]
    for purpose, names in PURPOSES.items():
        rows += [f"| **{purpose}** | |", *(f"| [{name}](#{name.lower()}) | {summary(left.pop(name))} |" for name in names)]
    if left:
        raise ValueError(f"docs/purposes.py must group all callbacks and sinks; missing: {sorted(left)}")
    return "\n".join(rows) + "\n"


def summary(one: type) -> str:
    """Return the first paragraph of a docstring in one line."""
    return as_markdown(" ".join((one.__doc__ or "").split("\n\n")[0].split()))


def as_markdown(text: str) -> str:
    """Return text with code in single backticks."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


def reference(classes: Iterable[type]) -> str:
    """Return a section for each class: signature, description, example, ranks. Its own page has arguments and errors."""
    return "\n".join(section(one) for one in classes)


def section(one: type) -> str:
    """Return the section of a class, only its first paragraph if another page explains it."""
    name = one.__name__
    prose, example = described(one)
    shown = [f"### {name}", f"`{called(one)}`"]
    if name in EXPLAINED:
        shown += [f"{summary(one)} See {EXPLAINED[name]}."]
    else:
        shown += [as_markdown(prose), *([f"See also {RELATED[name]}."] if name in RELATED else []), *example]
    shown += [f"On several ranks: {RANKS[name]}"] if name in RANKS else []
    return "\n\n".join(shown) + "\n"


def described(one: type) -> tuple[str, list[str]]:
    """Return the prose of a docstring before its arguments, and its example, which is tested in the source."""
    lines = inspect.cleandoc(one.__doc__ or "").splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith(">>> ")), len(lines))
    end = next((at for at, line in enumerate(lines[:start]) if SECTION.match(line)), start)
    example = re.sub(r"\s+# doctest: \S+", "", "\n".join(lines[start:]).strip("\n"))
    return "\n".join(lines[:end]).strip("\n"), [f"```pycon\n{example}\n```"] if example else []


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
