"""Choose the start of a run: its checkpoint and its branch."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from cadenza.checkpoint.catalogue import Catalogue, Listed
from cadenza.checkpoint.finding import checkpoint_at
from cadenza.checkpoint.reader import Reader
from cadenza.checkpoint.store import Branch, Loaded, Store
from cadenza.checkpoint.store.checkpoints import only_branch
from cadenza.checkpoint.store.files import absolute_path
from cadenza.errors import CheckpointError
from cadenza.files.paths import is_local, local_text
from cadenza.optim.finite import all_finite
from cadenza.records import branch_files
from cadenza.records.directory import OVER, RecordedRun
from cadenza.status.progress import Counters
from cadenza.status.requests import RESUMABLE

logger: logging.Logger = logging.getLogger("cadenza")


@dataclass(slots=True)
class Start:
    """The start of a run."""

    branch: Branch
    """The branch that the run continues or begins."""
    loaded: Loaded | None = None
    """The checkpoint at which the run continues; None for a new start."""
    path: str | None = None
    """The path of the checkpoint at which the branch began; None if it began without one."""
    left: int | None = None
    """The number of the branch that this start abandons; None if it abandons none."""
    recovery: Mapping[str, Any] | None = None
    """The data of the rollback with which the branch begins or began; None if the user chose its beginning."""
    lost: tuple[str, ...] = ()
    """The reasons why existing checkpoints are not used."""
    ended: str | None = None
    """The outcome that ends a run, ``"finished"`` or ``"stopped"``; None if the run has not ended."""
    named: bool = False
    """Whether the user named the checkpoint: a run continues there after any stop."""

    @property
    def rolls_back(self) -> bool:
        """Whether a new branch begins at a checkpoint."""
        return self.left is not None and self.loaded is not None

    @property
    def is_anew(self) -> bool:
        """Whether the run starts again without a checkpoint."""
        return self.left is not None and self.loaded is None

    def facts(self) -> dict[str, Any]:
        """Return the facts for ``run.json``, with ``parent`` if the run descends from another run."""
        foreign = [point for point in self.branch.ancestors if point.run != self.branch.run]
        parents = [{"run": point.run, "step": point.saved.step, "checkpoint": point.name} for point in foreign[-1:]]
        branch = {**self.branch.to_plain(), "resumed_at": self.path}
        branch |= {} if self.recovery is None else {"recovery": dict(self.recovery)}
        return {"id": self.branch.run, "branch": branch, **({"parent": parents[0]} if parents else {})}


def at_path(
    path: str,
    directory: RecordedRun | None,
    elsewhere: Iterable[str | PathLike[str]] = (),
    reader: Reader | None = None,
    *,
    recovery: Mapping[str, Any] | None = None,
) -> Start:
    """Return the start at a checkpoint: on a new branch, unless the checkpoint is the newest of the present branch.

    With `recovery`, a callback takes the run back: a new branch begins in any case.

    Raises:
        CheckpointError: The checkpoint cannot be used.
    """
    loaded, known = _read(path, reader or Reader()), _catalogue(directory, elsewhere)
    wrote, present = Branch.of(loaded.manifest, loaded.manifest["run"]), known.branch
    point = wrote.point(loaded.name)
    rank = present.rank(point.saved, wrote)
    on_present_line = wrote.run == present.run and rank is not None and rank[0] == 1
    newer = [one for one in known.line() if rank is None or (one.rank(present) or rank) > rank]
    if on_present_line and not newer and recovery is None:
        return Start(replace(present, at=loaded.name), loaded, path_in(directory), recovery=recovery_in(directory))
    used = _are_used(known, directory)
    branch = Branch(present.run, known.next_number if used else 0, (*wrote.ancestors, point), loaded.name)
    return Start(branch, loaded, absolute_path(path), present.number if used else None, recovery)


def at_newest(directory: RecordedRun, elsewhere: Iterable[str | PathLike[str]] = (), reader: Reader | None = None) -> Start:
    """Return the start at the newest checkpoint of the present branch; a new start if the run has no checkpoint to lose.

    Raises:
        CheckpointError: No existing checkpoint can be used, and a new start would waste one.
    """
    known, path, begun_at = _catalogue(directory, elsewhere), path_in(directory), openable_in(directory, elsewhere)
    branch, line, skipped = known.branch, known.line(), list[str]()
    own = [one for one in line if one.entry.branch is None or one.entry.branch.number == branch.number]
    begun = [one for one in line if _begins(branch, one)]
    reader = reader or Reader()
    loaded = (
        _first(own, skipped, reader)
        or _at_beginning(begun_at, branch, reader)
        or _first(begun, skipped, reader, exact=False)
        or _first([one for one in line if one not in own and one not in begun], skipped, reader)
    )
    for reason in skipped:
        logger.warning("skipped a checkpoint: %s", reason)
    if loaded is not None:
        return Start(replace(branch, at=loaded.name), loaded, path, recovery=recovery_in(directory))
    lost = [_unusable(one, reader) for one in known.all]
    is_over = ended_in(directory) is not None
    if any(one.wasted(is_over=is_over) for one in lost):
        lines = "\n  ".join(one.why for one in lost)
        raise CheckpointError(
            f"none of the checkpoints in {known} can be used, and starting anew would waste them:\n  {lines}\n"
            "Repair or remove them, name one with fit(resume=PATH), or give another directory=."
        )
    if is_over:
        models = [one for one in line if one.entry.manifest is not None and one.entry.manifest.get("weights_only")]
        return Start(branch, _first(models, [], reader, exact=False), path, lost=tuple(one.why for one in lost))
    if path is not None and (begun_at is None or branch.ancestors[-1].run != branch.run):
        why = "can no longer be used" if begun_at else "is at a URL, which only fit(resume=URL) opens"
        raise CheckpointError(
            f"the run in {str(directory.path)!r} began at {path!r} and saved nothing itself, but that checkpoint {why}. "
            "Name another one with fit(resume=PATH), or give another directory=."
        )
    if not _are_used(known, directory):
        return Start(branch)
    return Start(Branch(branch.run, known.next_number), None, None, branch.number, lost=tuple(one.why for one in lost))


def ended_in(directory: RecordedRun | None) -> str | None:
    """Return the outcome in ``run.json`` if the run is over; None if ``"auto"`` continues, as after an error or `TimeLimit`."""
    outcome = ((directory.previous if directory is not None else None) or {}).get("outcome") or {}
    return outcome["kind"] if outcome.get("kind") in OVER and not outcome.get(RESUMABLE) else None


def path_in(directory: RecordedRun | None) -> str | None:
    """Return the path of the checkpoint at which the present branch began; None if it began without one."""
    previous = (directory.previous if directory is not None else None) or {}
    path = (previous.get("branch") or {}).get("resumed_at")
    return None if path is None else str(path)


def openable_in(directory: RecordedRun | None, elsewhere: Iterable[str | PathLike[str]]) -> str | None:
    """Return `path_in` if it may be opened: it is on this machine, or in one of the folders and URLs that the run saves to.

    Nothing else that a ``run.json`` names is opened: see `stores_at`.
    """
    path = path_in(directory)
    if path is None or is_local(path) or path.rstrip("/").rpartition("/")[0] in map(local_text, elsewhere):
        return path
    return None


def recovery_in(directory: RecordedRun | None) -> Mapping[str, Any] | None:
    """Return the data of the rollback with which the present branch began; None if it began without one."""
    previous = (directory.previous if directory is not None else None) or {}
    recovery: Mapping[str, Any] | None = (previous.get("branch") or {}).get("recovery")
    return recovery


def newest_good(
    directory: RecordedRun, elsewhere: Iterable[str], step: int, *, whole_epochs: bool = False
) -> tuple[str, Counters] | None:
    """Return the path and the counters of the newest checkpoint with finite weights, and at most `step` complete steps.

    Only the line of the present branch counts; with `whole_epochs`, only checkpoints between two epochs. None: there is none.
    """
    for one in _catalogue(directory, elsewhere).line():
        manifest = one.entry.manifest
        if one.entry.saved.step > step or manifest is None or one.store.problem(one.entry) is not None:
            continue
        loaded = one.store.read(one.entry.saved)
        reached = Counters(**loaded.state["progress"])
        if whole_epochs and reached.batch_in_epoch:
            continue
        if all_finite(weight for weight in loaded.model.values() if isinstance(weight, Tensor)):
            return one.path, reached
    return None


class _Unusable(NamedTuple):
    why: str
    kind: str

    def wasted(self, *, is_over: bool) -> bool:
        """Return whether a new start would waste it. After the end of the run only damage counts: there is no new start."""
        return self.kind == "damaged" if is_over else self.kind in ("damaged", "weights only", "abandoned")


def _catalogue(directory: RecordedRun | None, elsewhere: Iterable[str | PathLike[str]]) -> Catalogue:
    """Return the checkpoints of a run.

    Args:
        directory: The run's directory, if it has one.
        elsewhere: Further folders and URLs.
    """
    own = [Store(directory.checkpoints)] if directory is not None else []
    others = [store for store in map(Store, elsewhere) if str(store.files) not in map(str, own)]
    return Catalogue([*own, *others], _present(directory))


def _are_used(known: Catalogue, directory: RecordedRun | None) -> bool:
    """Return whether an earlier start of the run left checkpoints, facts or rows."""
    return bool(known.all) or (
        directory is not None and (directory.previous is not None or branch_files.has_rows(directory.path))
    )


def _unusable(one: Listed, reader: Reader) -> _Unusable:
    """Return the reason why a checkpoint cannot be used, if none on the line can."""
    manifest, problem = one.entry.manifest, reader.problem(one.store, one.entry)
    if manifest is None or problem is not None:
        return _Unusable(str(problem), "unfinished" if one.entry.is_unfinished else "damaged")
    problem = one.store.problem(one.entry)
    if problem is None:
        return _Unusable(f"{one.name}: abandoned when the run was rolled back", "abandoned")
    return _Unusable(problem, "weights only" if manifest.get("weights_only") else "not exact")


def _begins(branch: Branch, one: Listed) -> bool:
    """Return whether a branch began at a checkpoint."""
    wrote = one.entry.branch
    return bool(wrote and branch.ancestors and wrote.point(one.name) == branch.ancestors[-1])


def _present(directory: RecordedRun | None) -> Branch:
    """Return the present branch of the run; without a ``run.json``, the branch of the checkpoints in its directory."""
    previous: Mapping[str, Any] | None = directory.previous if directory is not None else None
    if previous is not None:
        return Branch.of(previous.get("branch") or {}, str(previous.get("id", "")))
    found = Branch() if directory is None else only_branch(Store(directory.checkpoints).entries(), str(directory.checkpoints))
    return found if found.run else Branch(uuid.uuid4().hex)


def _first(found: Iterable[Listed], skipped: list[str], reader: Reader, *, exact: bool = True) -> Loaded | None:
    """Return the first usable checkpoint. Append the reasons why earlier ones were skipped to `skipped`."""
    for one in found:
        tried = reader.tried(one.store, one.entry, exact=exact)
        if not isinstance(tried, str):
            return tried
        skipped.append(tried)
    return None


def _at_beginning(path: str | None, branch: Branch, reader: Reader) -> Loaded | None:
    """Return the checkpoint at which a branch began. It may be inexact, since the user named it."""
    if path is None or not branch.ancestors:
        return None
    try:
        loaded = _read(path, reader)
    except CheckpointError:
        return None
    point = Branch.of(loaded.manifest, loaded.manifest["run"]).point(loaded.name)
    return loaded if point == branch.ancestors[-1] else None


def _read(path: str, reader: Reader) -> Loaded:
    store, saved = checkpoint_at(path)
    if saved is None:
        found = [one.name for one in store.saved()]
        there = f"expected one of {found} in {str(store.files)!r}" if found else f"{str(store.files)!r} holds none"
        if "://" not in path and os.path.isfile(os.path.join(path, "trainer_state.json")):
            raise CheckpointError(
                f"{path!r} is a checkpoint of transformers, which holds no run to continue. Load its weights with "
                "from_pretrained, and start a new run with fit()."
            )
        raise CheckpointError(f"there is no checkpoint at {path!r}: {there}. Give the path of a checkpoint, or resume='auto'.")
    return reader.read(store, saved)
