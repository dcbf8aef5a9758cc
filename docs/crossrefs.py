"""Links from code in prose to the reference: `EarlyStopping`, `run.stop(...)`, `on_step_end`. For the site."""

from __future__ import annotations

import re
from functools import cache

from public_names import homes

from cadenza import Callback, Run, Trainer

# Code blocks, links and headings stay unchanged; only a code span outside of them becomes a link.
SPAN = re.compile(
    r"^ *```.*?^ *```$|^#[^\n]*$|"
    r"\[(?:`[^`]*`|[^\]\n])*\](?:\([^)\n]*\)|\[[^\]\n]*\])|(?P<ticks>``?)(?P<code>[^`\n]+)(?P=ticks)",
    re.DOTALL | re.MULTILINE,
)
NAME = re.compile(r"^(?:(?P<owner>run|trainer|Run|Trainer|Callback)\.)?(?P<name>\w+)(?:\(.*\))?$")
OWNERS = {"run": Run, "trainer": Trainer}
COMMON = ("on", "page", "small", "launch", "freeze", "unfreeze", "Text", "Image", "Figure", "Audio")


@cache
def targets() -> dict[str, str]:
    """Return the full name for each name that stands for itself in prose."""
    found = {name: f"cadenza.Callback.{name}" for name in vars(Callback) if name.startswith("on_") and name != "on_fault"}
    for full in homes().values():
        if (name := full.rpartition(".")[2]) not in COMMON:
            found[name] = full
    return found


def linked(text: str, own: str = "") -> str:
    """Return Markdown with links to the reference; `own` is a full name that is not linked."""

    def link(match: re.Match[str]) -> str:
        target = _target(match["code"]) if match["code"] else None
        return match[0] if target in (None, own) else f"[{match[0]}][{target}]"

    return SPAN.sub(link, text)


def _target(code: str) -> str | None:
    match = NAME.match(code)
    if match is None:
        return None
    if (owner := (match["owner"] or "").lower()) in OWNERS:
        of = OWNERS[owner]
        return f"cadenza.{of.__name__}.{match['name']}" if match["name"] in _members(of) else None
    return targets().get(match["name"])


@cache
def _members(of: type) -> set[str]:
    return {name for name in (*vars(of), *vars(of).get("__annotations__", {})) if not name.startswith("_")}
