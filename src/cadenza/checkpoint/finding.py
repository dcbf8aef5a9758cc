"""Find checkpoints by the path and the name that a user gives: the last, the best, one of a step, or one by its path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.checkpoint.catalogue import Catalogue, Listed
from cadenza.checkpoint.store import Branch, Entry, Saved, Store
from cadenza.checkpoint.store.checkpoints import only_branch
from cadenza.checkpoint.store.link_names import BEST, LAST
from cadenza.checkpoint.store.links import linked
from cadenza.checkpoint.store.manifest import best_text, best_value
from cadenza.errors import CheckpointError, nearest
from cadenza.files.disk import read_object
from cadenza.files.paths import local_text
from cadenza.status.counting import some

Which = str | PathLike[str]
"""``"last"``, ``"best"``, ``"best:eval/acc"``, the name of a checkpoint such as ``"step-500"``, or a path."""

Problem = Callable[[Store, Entry], str | None]
"""Returns a sentence on why a checkpoint cannot be used; None if it can."""

_STEP = re.compile(r"step-0*(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was chosen. Its files are not verified yet."""

    store: Store
    saved: Saved
    best: Mapping[str, Any] = field(default_factory=dict)
    """If it was chosen as the best: monitor, mode, value, step, checkpoint, and the averaged weights that had the value."""

    @property
    def path(self) -> str:
        """The path or the URL of the checkpoint."""
        return f"{self.store.files}/{self.saved.name}"

    def __str__(self) -> str:
        why = f", the best by {self.best['monitor']} ({best_text(self.best)})" if self.best else ""
        return f"{self.saved.name}{why}"


def find(
    path: str | PathLike[str],
    which: Which | None = None,
    problem: Problem | None = None,
    elsewhere: Iterable[str | PathLike[str]] = (),
) -> Found:
    """Return a checkpoint.

    Args:
        path: A run directory, a folder of checkpoints, an fsspec URL, or one checkpoint.
        which: See `Which`; None: the last, or the one at the path.
        problem: Returns why a checkpoint cannot be used, or None, to find the last; None: each is verified.
        elsewhere: See `stores_at`.

    Raises:
        CheckpointError: There is none; `which` is ``"best"`` and several results chose one, or none did; or `path` is one
            checkpoint already.
        ValueError: `which` is no name of a checkpoint.
    """
    text = local_text(path)
    check_which(which)
    if which is not None and is_path(which):
        return find(which)
    stores, branch = stores_at(text, elsewhere)
    if any(store.saved() for store in stores):
        return find_in(stores, branch, LAST if which is None else fspath(which), text, problem)
    folder, _, name = text.rstrip("/").rpartition("/")
    store, saved = checkpoint_at(text)
    if saved is None and name in (LAST, BEST) and which is None and store.saved():
        return find(folder, name)
    if saved is None:
        there = f"; {store.files} has {', '.join(one.name for one in store.saved())}" if store.saved() else ""
        raise CheckpointError(
            f"there are no weights at {text!r}: expected a checkpoint, a run directory or a .safetensors file{there}."
            f"{not_opened(text, stores)}"
        )
    if which is not None:
        raise CheckpointError(
            f"{text} is one checkpoint, and which={which!r} chooses among those of a run. Give the directory of the run, or "
            "leave which= out."
        )
    return Found(store, saved)


def find_in(stores: Sequence[Store], branch: Branch | None, which: str, where: str, problem: Problem | None = None) -> Found:
    """Return a checkpoint of a run by its name.

    Args:
        stores: The folders and URLs that the run saves to.
        branch: The present branch of the run; None: the newest one of the only run that saves in the first store in use.
        which: See `Which`; no path.
        where: The path that the user gave, for messages.
        problem: As for `find`.

    Raises:
        CheckpointError: As `find`.
    """
    remark, stores = not_opened(where, stores), [store for store in stores if store.saved()]
    if not stores:
        raise CheckpointError(f"there are no checkpoints in {where}, so which={which!r} finds none.{remark}")
    if match := _STEP.fullmatch(which):
        return _named(stores, int(match[1]), match[2], which)
    if branch is None:
        stores = stores[:1]
        branch = only_branch(stores[0].entries(), str(stores[0].files))
    line = Catalogue(stores, branch).line()
    if which == LAST:
        return _last(line, where, problem or _verified)
    return _best(line, which.removeprefix(BEST).removeprefix(":"), where, remark)


def check_which(which: object, name: str = "which") -> None:
    """Raise `ValueError` or `TypeError` unless `which` is one of `Which`, or None."""
    if which is None or isinstance(which, PathLike):
        return
    if not isinstance(which, str):
        raise TypeError(f"{name} must be 'last', 'best', a name such as 'step-500', or a path; got {which!r}")
    if is_name(which) or is_path(which):
        return
    meant = nearest(which, [BEST, LAST]) or (" Did you mean 'last'?" if which in ("latest", "newest", "auto") else "")
    raise ValueError(
        f"{name} must be 'last', 'best', 'best:eval/acc' (by this result), a name such as 'step-500', or a path; got "
        f"{which!r}.{meant}"
    )


def checked_name(which: str | None) -> str:
    """Return the name of a checkpoint; ``"last"`` for None.

    Raises:
        CheckpointError: It is a path, or cannot be the name of a checkpoint.
    """
    try:
        check_which(which)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if which is not None and is_path(which):
        raise CheckpointError(
            f"expected the name of a checkpoint; got the path {which!r}. Give it instead of the run directory."
        )
    return which or LAST


def is_name(which: str) -> bool:
    """Return whether `which` is a name of a checkpoint; a path of this name is written ``./best``."""
    return which in (LAST, BEST) or which.startswith(f"{BEST}:") or _STEP.fullmatch(which) is not None


def is_path(which: Which) -> bool:
    """Return whether `which` is a path, and no name."""
    if isinstance(which, PathLike):
        return True
    return not is_name(which) and ("/" in which or os.sep in which or Path(which).exists())


def stores_at(path: str | PathLike[str], elsewhere: Iterable[str | PathLike[str]] = ()) -> tuple[list[Store], Branch | None]:
    """Return the stores at a path, and the present branch of its run; None if no ``run.json`` names a branch.

    Args:
        path: A run directory, its ``checkpoints``, another folder of checkpoints, or an fsspec URL.
        elsewhere: The other folders and URLs that the caller knows. Those that ``run.json`` names are not opened: it may come
            from another person, and opening a URL sends requests, with the credentials of the reader.
    """
    text = local_text(path).rstrip("/")
    if "://" in text:
        return [Store(text)], None
    folder, facts = Path(text), _facts_at(text)
    stores = [Store(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder), *map(Store, elsewhere)]
    branch = None
    with suppress(LookupError, TypeError, ValueError):
        branch = Branch.of(facts.get("branch") or {}, str(facts["id"]))
    entries = (entry for store in stores for entry in store.entries())
    return stores, branch if any(one.branch.run == branch.run for one in entries if one.branch and branch) else None


def not_opened(path: str, stores: Iterable[Store]) -> str:
    """Return a sentence on the folders and URLs that the ``run.json`` at a path names beside `stores`; empty without any."""
    others, opened = _facts_at(path).get("checkpoints"), {str(store.files) for store in stores}
    names = [repr(str(one)[:200]) for one in (others if isinstance(others, list) else []) if str(one) not in opened]
    return f" Its run.json also names {some(names)}. Only a path that you give is opened: give that one." if names else ""


def _facts_at(path: str) -> dict[str, Any]:
    """Return the content of the ``run.json`` of a run directory or of its ``checkpoints``; empty if it cannot be read."""
    folder = Path(path)
    of_run = folder if (folder / "run.json").is_file() or folder.name != "checkpoints" else folder.parent
    with suppress(ValueError):  # the checkpoints can be read without it
        return read_object(of_run / "run.json") or {}
    return {}


LINK = "cadenza"
"""The name of the link to a checkpoint in a folder that shows it to callbacks of other systems, such as ``checkpoint-500``."""


def checkpoint_at(path: str) -> tuple[Store, Saved | None]:
    """Return the checkpoint at a path, and the store that holds it; None if there is no checkpoint.

    The path may be that of a link, such as ``runs/a/checkpoints/best``, or of a folder with a link `LINK` to it.

    Raises:
        CheckpointError: The checkpoint of the link is gone.
    """
    if "://" not in path and os.path.islink(os.path.join(path, LINK)):
        path = os.path.realpath(os.path.join(path, LINK))
    folder, _, name = path.rstrip("/").rpartition("/")
    store = Store(folder or ("/" if path.startswith("/") else "."))
    return store, store.named(name) or linked(store, name)


def _last(line: Sequence[Listed], where: str, problem: Problem) -> Found:
    skipped = []
    for store, entry in line:
        why = problem(store, entry)
        if why is None:
            return Found(store, entry.saved)
        skipped.append(why)
    why = "; ".join(skipped) or "all are of branches that the run has abandoned. Give the name of one of them"
    raise CheckpointError(f"none of the checkpoints in {where} can be used: {why}")


def _verified(store: Store, entry: Entry) -> str | None:
    return store.problem(entry, exact=False)


def _best(line: Sequence[Listed], monitor: str, where: str, remark: str) -> Found:
    told, damaged = _told(line), ""
    choices = ", ".join(f"'best:{name}' ({best_text(one.fact)}, {one.fact['checkpoint']})" for name, one in told.items())
    if not told:
        damaged = next((str(one.store.problem(one.entry)) for one in line if one.is_damaged), "")
        names = ", ".join(one.name for one in line)
        raise CheckpointError(
            f"no checkpoint in {where} is known as the best: {damaged or 'none was kept for its result'}. Give which='last' or "
            f"a name: there is {names}. Checkpoint(keep_best=('eval/acc', 'max')) keeps the best of a run.{remark}"
        )
    if not monitor and len(told) > 1:
        raise CheckpointError(f"{where} has a best checkpoint by each of {len(told)} results. Give one: which={choices}.")
    one = told.get(monitor or next(iter(told)))
    if one is None:
        raise CheckpointError(
            f"no checkpoint in {where} is the best by {monitor!r}.{nearest(monitor, told)} There is {choices}.{remark}"
        )
    name, value = one.fact["checkpoint"], best_text(one.fact)
    if one.doubt:
        raise CheckpointError(
            f"the best checkpoint in {where} is not known: {one.doubt}, and it may be the best. The best before it is {name} "
            f"({one.fact['monitor']} {value}): give which={name!r} to take that one."
        )
    saved = one.store.named(name)
    if saved is None:
        there = ", ".join(saved.name for saved in one.store.saved())
        raise CheckpointError(
            f"{name}, the best by {one.fact['monitor']} ({value}), no longer exists in {one.store.files}. There is {there}."
        )
    return Found(one.store, saved, one.fact)


class _Told(NamedTuple):
    """What the newest checkpoint of a writer says about the best by one monitor."""

    store: Store
    fact: Mapping[str, Any]
    doubt: str
    """The problem of a newer checkpoint that cannot be read and may say something else; empty if there is none."""


def _told(line: Iterable[Listed]) -> dict[str, _Told]:
    """Return the best checkpoint by each monitor. The newest checkpoint of each writer tells it."""
    told: dict[str, _Told] = {}
    writers: set[tuple[str, str]] = set()
    doubt = ""
    for one in line:
        store, entry = one
        if entry.manifest is None:
            doubt = doubt or (str(one.store.problem(entry)) if one.is_damaged else "")
            continue
        writer = (str(store.files), entry.manifest["run"])
        if writer in writers:
            continue
        writers.add(writer)
        for fact in entry.manifest.get("best", []):
            other = told.get(fact["monitor"])
            if other is None or _is_better(fact, other.fact):
                told[fact["monitor"]] = _Told(store, fact, doubt)
    return told


def _is_better(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    value, best = best_value(one), best_value(other)
    return value > best if one["mode"] == "max" else value < best


def _named(stores: Sequence[Store], step: int, again: str | None, which: str) -> Found:
    there = [(store, saved) for store in stores for saved in store.saved()]
    fitting = [(store, one) for store, one in there if one.step == step and again in (None, str(one.again))]
    if not fitting:
        raise CheckpointError(f"there is no checkpoint {which!r}; there is {', '.join(saved.name for _, saved in there)}")
    return Found(*max(fitting, key=lambda pair: pair[1].again))
