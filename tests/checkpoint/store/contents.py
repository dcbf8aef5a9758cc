"""Small checkpoints for tests of the store."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cadenza.checkpoint.catalogue import Catalogue, first_usable
from cadenza.checkpoint.store import Content, Entry, Saved, Store


def content(step: int, **facts: Any) -> Content:
    """Return a checkpoint's content that says which step it is of."""
    model = {"weight": torch.full((3,), float(step)), "count": torch.tensor(step)}
    state = {"step": step, "moments": [torch.arange(4.0) + step], "pair": (1, None)}
    return Content.of(model, state, {"step": step, "reason": "a test", "exact": True, **facts})


def filled(location: Path | str, *steps: int, run: str = "r1") -> tuple[Store, list[Saved]]:
    """Return a store with a checkpoint of each step."""
    store = Store(location, run)
    return store, [store.write(content(step)) for step in steps]


def step_in(store: Store, saved: Saved) -> int:
    """Return the step that model and state of a checkpoint agree to be of."""
    loaded = store.read(saved)
    step = int(loaded.state["step"])
    assert loaded.model["weight"].tolist() == [step] * 3
    assert loaded.state["moments"][0].tolist() == [step, step + 1, step + 2, step + 3]
    assert loaded.state["pair"] == (1, None)
    return step


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def latest(store: Store, *, exact: bool = True) -> tuple[Saved | None, list[str]]:
    """Return the newest checkpoint of the only run in a folder that can be used, and why newer ones were skipped."""
    newest, skipped = first_usable(Catalogue([Store(str(store.files))]).line(), partial(Entry.problem, exact=exact))
    return None if newest is None else newest.saved, skipped


def prune(store: Store, keep: Collection[str]) -> list[str]:
    """Delete the checkpoints of the run that writes to a store, except some."""
    return Catalogue([store], store.branch).prune(keep)
