"""Tables of classes and of their counterparts in other systems, for `docs/generate.py`."""

from __future__ import annotations

import re

from guides import GUIDES

from cadenza import callbacks, sinks


def classes(*names: str) -> str:
    """Return a table of callbacks and sinks: the first sentence of each docstring, and the page with more examples."""
    rows = ["| class | purpose | guide |", "|---|---|---|"]
    rows += [f"| `{name}` | {summary(class_of(name))} | {GUIDES.get(name, '')} |" for name in names]
    return "\n".join(rows) + "\n"


def class_of(name: str) -> type:
    """Return the callback or the sink of this name."""
    found: type = getattr(callbacks if name in callbacks.__all__ else sinks, name)
    return found


def summary(described: type) -> str:
    """Return the first paragraph of a docstring in one line, with code in single backticks."""
    text = " ".join((described.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r"``(.+?)``", r"`\1`", text)


def counterparts(table: dict[str, dict[str, str]]) -> str:
    """Return the table of other systems' built-in callbacks and their native equivalents."""
    rows = ["| system | built-in callback | native equivalent |", "|---|---|---|"]
    for system, built_ins in table.items():
        rows += [f"| {system} | `{name}` | `{native}` |" for name, native in built_ins.items()]
    return "\n".join(rows) + "\n"
