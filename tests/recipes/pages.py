"""The Python blocks of a recipe, for assertions that a reader of the page does not need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from cadenza import Trainer

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "recipes"


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (FOLDER / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def executed(page: str, first: int | None = None, **replaced: str) -> dict[str, Any]:
    """Execute the first blocks of a page in the present folder; return their names.

    Args:
        page: The name of the page.
        first: The number of blocks; None: all.
        replaced: By a name in the page, the name that takes its place.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page)[:first]:
        for old, new in replaced.items():
            assert old in block
            block = block.replace(old, new)
        exec(compile(block, f"{page}.md", "exec"), names)
    return names


def run(*codes: str) -> dict[str, Any]:
    """Execute code in one namespace, and return it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in codes:
        exec(compile(code, "page", "exec"), names)
    return names


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
