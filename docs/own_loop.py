"""The listings and diffs of "From your own loop", from the scripts in ``examples/own_loop``."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "own_loop"
FEATURES = ("accumulation", "precision", "evaluation", "early_stopping", "sinks", "resume", "ranks")
STAGES = {"steps": ("by_hand", "trainer", *FEATURES), "attach": ("by_hand", "attached", *FEATURES)}
"""The scripts of each folder, in the order in which they follow from each other."""
SCRIPTS = ("gpt", "gan", "policy")
"""Scripts that exist by hand and with Cadenza."""


def listing(script: str) -> str:
    """Return a script as a block."""
    return f"```python\n{_read(script)}```\n"


def diff(before: str, after: str, context: int = 2) -> str:
    """Return the unified diff of two scripts as a block."""
    lines = difflib.unified_diff(_read(before).splitlines(), _read(after).splitlines(), n=context, lineterm="")
    return "```diff\n" + "".join(f"{line}\n" for line in list(lines)[2:]) + "```\n"


def changed(before: str, after: str) -> tuple[int, int]:
    """Return how many lines a diff writes, blank lines left out, and how many it removes."""
    lines = diff(before, after, context=0).splitlines()
    return sum(line[0] == "+" and line != "+" for line in lines), sum(line[0] == "-" for line in lines)


def parts() -> dict[str, Callable[[], str]]:
    """Return the generated parts of the page, by name."""
    found: dict[str, Callable[[], str]] = {}
    for folder in STAGES:
        found[f"own_{folder}_by_hand"] = partial(listing, f"{folder}/by_hand")
    for before, after in itertools.pairwise(STAGES["steps"]):
        found[f"own_steps_{after}"] = partial(diff, f"steps/{before}", f"steps/{after}")
    found["own_attach_attached"] = partial(diff, "attach/by_hand", "attach/attached")
    found["own_attach_features"] = partial(diff, "attach/attached", "attach/ranks")
    return found


def _read(script: str) -> str:
    return (EXAMPLES / f"{script}.py").read_text(encoding="utf-8")
