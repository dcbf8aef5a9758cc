"""Find the checkpoint from which a past step of a run is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.checkpoint.catalogue import Catalogue, Listed
from cadenza.checkpoint.finding import checkpoint_at, not_opened, stores_at
from cadenza.checkpoint.starting import openable_in, recovery_in
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.checkpoints import only_branch
from cadenza.errors import CheckpointError
from cadenza.records.directory import RecordedRun
from cadenza.status.branches import Branch
from cadenza.status.counting import counted


class Before(NamedTuple):
    """A checkpoint before a step."""

    path: str
    step: int
    skipped: tuple[str, ...]
    """The reasons why nearer checkpoints cannot be used."""
    recovery: Mapping[str, Any] | None
    """The data of the rollbacks of the run if the step came after the first one: they hold the batches that were left out."""


def newest_before(recorded: RecordedRun, step: int, elsewhere: Sequence[str] = ()) -> Before:
    """Return the newest checkpoint on the present branch of a run that was written before a step. It is verified.

    Args:
        recorded: The run.
        step: The number of the step, from 1. The checkpoint has at most ``step - 1`` complete steps.
        elsewhere: The folders and URLs outside of its directory to which its trainer saves.

    Raises:
        CheckpointError: There is none that can be continued. The message names those that exist.
    """
    skipped, later = list[str](), list[str]()
    for store, entry in _candidates(recorded, elsewhere):
        if entry.saved.step >= step:
            later.append(entry.saved.name)
            continue
        problem = store.problem(entry)
        if problem is None:
            return Before(f"{store.files}/{entry.saved.name}", entry.saved.step, tuple(skipped), _recovery_at(recorded, step))
        skipped.append(problem)
    remark = not_opened(str(recorded.path), map(Store, elsewhere))
    there = "; ".join([*skipped, *([f"later ones: {', '.join(reversed(later))}"] if later else [])])
    raise CheckpointError(
        f"the run in {str(recorded.path)!r} has no checkpoint before step {step} from which it can be repeated: expected one "
        f"with at most {counted(step - 1, 'step')}, whole and exact; found {there or 'none'}. Repeat a step after a "
        f"checkpoint, or keep more of them: Checkpoint(every=..., keep_last=None).{remark}"
    )


def _recovery_at(recorded: RecordedRun, step: int) -> Mapping[str, Any] | None:
    """Return the data of the last rollback, which add to those of the earlier ones; None for a step before the first."""
    recovery, facts = recovery_in(recorded), recorded.previous or {}
    if recovery is None:
        return None
    run = str(facts.get("id", ""))
    branch = Branch.of(facts.get("branch") or {}, run)
    first = min((point.saved.step for point in branch.ancestors if point.run == run), default=recovery["to"])
    return recovery if step > first else None


def _candidates(recorded: RecordedRun, elsewhere: Sequence[str]) -> Iterator[Listed]:
    """Yield the checkpoints on the line of the present branch, newest first, and then the one at which the branch began."""
    stores, branch = stores_at(recorded.path, elsewhere)
    if branch is None:
        branch = only_branch((entry for store in stores for entry in store.entries()), str(recorded.checkpoints))
    yield from Catalogue(stores, branch).line()
    if (path := openable_in(recorded, elsewhere)) is not None and Path(path).parent != recorded.checkpoints.absolute():
        store, saved = checkpoint_at(path)
        yield from (Listed(store, entry) for entry in store.entries() if entry.saved == saved)
