"""Find checkpoints by a path of the user: a run directory, a folder, a checkpoint or a URL."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from cadenza.checkpoint.store import Branch, Saved, Store
from cadenza.checkpoint.store.links import linked
from cadenza.files.disk import read_object


def store_at(path: str | PathLike[str]) -> tuple[Store, Branch | None]:
    """Return the store at a path, and the present branch of its run; None if no ``run.json`` names a branch.

    Args:
        path: A run directory, its ``checkpoints``, another folder of checkpoints, or an fsspec URL. For a run directory
            that holds no checkpoints, the first other folder or URL that its run saves to.
    """
    text = fspath(path).rstrip("/")
    if "://" in text:
        return Store(text), None
    folder = Path(text)
    of_run = folder if (folder / "run.json").is_file() or folder.name != "checkpoints" else folder.parent
    facts: dict[str, Any] = {}
    with suppress(ValueError):  # the checkpoints can be read without it
        facts = read_object(of_run / "run.json") or {}
    store = Store(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    others = facts.get("checkpoints")
    for other in others if isinstance(others, list) else []:
        store = store if store.saved() else Store(str(other))
    branch = None
    with suppress(LookupError, TypeError, ValueError):
        branch = Branch.of(facts.get("branch") or {}, str(facts["id"]))
    return store, branch if any(one.branch.run == branch.run for one in store.entries() if one.branch and branch) else None


def checkpoint_at(path: str) -> tuple[Store, Saved | None]:
    """Return the checkpoint at a path, and the store that holds it; None if there is no checkpoint.

    The path may be that of a link, such as ``runs/a/checkpoints/best``.

    Raises:
        CheckpointError: The checkpoint of the link is gone.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    store = Store(folder or ("/" if path.startswith("/") else "."))
    return store, store.named(name) or linked(store, name)
