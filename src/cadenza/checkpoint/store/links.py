"""Links to the newest and to the best checkpoint, beside the checkpoints. Readers of checkpoints skip them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cadenza.checkpoint.store.checkpoints import Store
from cadenza.checkpoint.store.link_names import is_link_name
from cadenza.errors import CheckpointError
from cadenza.status.branches import Saved


def linked(store: Store, name: str) -> Saved | None:
    """Return the checkpoint that a link such as ``last`` or ``best`` names; None if there is no such link.

    Raises:
        CheckpointError: The checkpoint is gone.
    """
    target = store.files.links().get(name) if is_link_name(name) else None
    if target is None:
        return None
    if (found := store.named(target)) is None:
        there = ", ".join(saved.name for saved in store.saved()) or "no other"
        raise CheckpointError(
            f"the link {name!r} in {store.files} names {target}, which is gone. There is {there}: give the path of one. The "
            "next save of the run sets the link again."
        )
    return found


def set_links(store: Store, targets: Mapping[str, str], gone: Collection[str] = ()) -> None:
    """Point links to checkpoints, by name, and delete the others if their checkpoint is gone, or is among `gone`.

    Raises:
        OSError: A link cannot be set.
    """
    present = store.files.links()
    for name, target in targets.items():
        if present.get(name) != target:
            store.files.link(name, target)
    if others := present.keys() - targets.keys():
        there = {saved.name for saved in store.saved()} - {*gone}
        for name in others:
            if present[name] not in there:
                store.files.unlink(name)
