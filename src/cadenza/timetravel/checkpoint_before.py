"""Find the checkpoint from which a past step of a run is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.checkpoint.catalogue import Catalogue, first_usable
from cadenza.checkpoint.resuming import RunSoFar
from cadenza.checkpoint.store import Entry
from cadenza.errors import CheckpointError
from cadenza.records.directory import RecordedRun
from cadenza.status.branches import Branch
from cadenza.status.formats import counted


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
    catalogue = Catalogue.at(recorded.path, elsewhere)
    line = catalogue.line()
    line += [one for one in RunSoFar(recorded, elsewhere).begun if Path(one.path).parent != recorded.checkpoints.absolute()]
    newest, skipped = first_usable((entry for entry in line if entry.saved.step < step), Entry.problem)
    if newest is not None:
        return Before(newest.path, newest.saved.step, tuple(skipped), _recovery_at(recorded, step))
    later = [entry.name for entry in reversed(line) if entry.saved.step >= step]
    there = "; ".join([*skipped, *([f"later ones: {', '.join(later)}"] if later else [])])
    raise CheckpointError(
        f"the run in {str(recorded.path)!r} has no checkpoint before step {step} from which it can be repeated: expected one "
        f"with at most {counted(step - 1, 'step')}, whole and exact; found {there or 'none'}. Repeat a step after a "
        f"checkpoint, or keep more of them: Checkpoint(every=..., keep_last=None).{catalogue.not_opened}"
    )


def _recovery_at(recorded: RecordedRun, step: int) -> Mapping[str, Any] | None:
    """Return the data of the last rollback, which add to those of the earlier ones; None for a step before the first."""
    recovery, facts = RunSoFar(recorded).recovery, recorded.previous or {}
    if recovery is None:
        return None
    run = str(facts.get("id", ""))
    branch = Branch.of(facts.get("branch") or {}, run)
    first = min((point.saved.step for point in branch.ancestors if point.run == run), default=recovery["to"])
    return recovery if step > first else None
