"""The checkpoints that a path means, as a person gives it: of a run directory, of a folder or of a URL."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from cadenza.store import Branch, Store


def store_at(path: str | PathLike[str]) -> tuple[Store, Branch | None]:
    """Return the checkpoints at a path, and the branch that the run is on; None where no ``run.json`` says it.

    Args:
        path: A run directory, its ``checkpoints``, another folder of checkpoints, or an fsspec URL. Of a run directory
            without checkpoints of its own, the first place to which its run saves.
    """
    text = fspath(path).rstrip("/")
    if "://" in text:
        return Store(text), None
    folder = Path(text)
    facts = _facts_in(folder if (folder / "run.json").is_file() or folder.name != "checkpoints" else folder.parent)
    store = Store(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    for place in facts.get("checkpoints") or []:
        store = store if store.saved() else Store(place)
    branch = Branch.of(facts.get("branch") or {}, str(facts["id"])) if "id" in facts else None
    return store, branch if any(one.branch.run == branch.run for one in store.entries() if one.branch and branch) else None


def lasting(path: str | PathLike[str]) -> str:
    """Return a path that means the same from every working directory."""
    text = fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _facts_in(folder: Path) -> Mapping[str, Any]:
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the checkpoints can be read without
        return {}
    return facts if isinstance(facts, dict) else {}
