"""Find where the repetition of a past step begins, and agree on it over all ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.checkpoint.catalogue import Catalogue, first_usable
from cadenza.checkpoint.resumption import RunSoFar
from cadenza.checkpoint.store import Entry
from cadenza.drivers.consensus import decided
from cadenza.engine.session import UNDER_WAY
from cadenza.errors import CheckpointError, DirectoryError, DistributedError
from cadenza.files.paths import local_path
from cadenza.loops.run_segment import external_folders
from cadenza.records.directory import OVER, RecordedRun
from cadenza.records.reading import read_records
from cadenza.status.branches import Branch
from cadenza.status.formats import counted
from cadenza.trainer import Trainer


class ReplayStart(NamedTuple):
    """The start of a replay."""

    checkpoint: str
    """The path of the checkpoint from which the run is repeated."""
    recovery: Mapping[str, Any] | None
    """The data of the rollbacks of the run if the step came after the first one: they hold the batches that were left out."""
    recorded: dict[int, dict[str, float]]
    """The recorded values after the checkpoint, by step and name."""
    folder: str
    """A temporary directory. The main process deletes it."""
    warnings: list[str]

    @staticmethod
    def on_all_ranks(trainer: Trainer, run: str | PathLike[str], step: int) -> ReplayStart:
        """Return the start on all ranks, or raise an error on all of them. Every rank must call this."""
        _check_trainer(trainer)
        start = lambda steps: ReplayStart.of(local_path(run), steps, external_folders(trainer.callbacks))  # noqa: E731
        return decided(trainer.driver.meeting, lambda: _checked(trainer, step), start, _failed)

    @staticmethod
    def of(path: Path, steps: Sequence[int], elsewhere: Sequence[str]) -> ReplayStart:
        """Return the start, on the main process, from the step that each rank gave."""
        step = steps[0]
        other = next((rank for rank, number in enumerate(steps) if number != step), None)
        if other is not None:
            raise ValueError(
                f"step must be the same on all ranks; got {step} on rank 0 and {steps[other]} on rank {other}. All ranks "
                "repeat a step together."
            )
        recorded = RecordedRun(path)
        if recorded.previous is None:
            raise DirectoryError(f"{str(path)!r} is not the directory of a run: expected a run.json in it.")
        _check_done(recorded.previous, path, step)
        newest, skipped = newest_before(recorded, step, elsewhere)
        done = newest.saved.step
        rows: dict[int, dict[str, float]] = {}
        for record in read_records(path / "metrics.jsonl"):
            if record.step > done:
                rows.setdefault(record.step, {}).update({name: float(value) for name, value in record.values.items()})
        told = [f"a nearer checkpoint was skipped: {reason}" for reason in skipped]
        last = max([done, *rows])
        if step > last + 1 and recorded.previous.get("progress") is None:
            told.append(f"whether the run did step {step} is not known: it is not over, and its last record is of step {last}.")
        return ReplayStart(newest.path, _recovery_at(recorded, step), rows, tempfile.mkdtemp(prefix="cadenza-replay-"), told)


def _check_trainer(trainer: object) -> None:
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise TypeError(
            f"replay_step(trainer, run, step) takes a cadenza.Trainer first; got a {kind.__module__}.{kind.__qualname__}. "
            "Trainers of cadenza.compat and Loop objects cannot repeat a step."
        )


def _checked(trainer: Trainer, step: int) -> int:
    """Return the step, on each rank, if this rank can repeat it."""
    if any(session.module is trainer.model for session in UNDER_WAY):
        raise RuntimeError(
            "the model of this trainer is in a run or a replay that is not over, which this replay would change. End it first, "
            "such as with close() of the replay, or make another trainer with another model."
        )
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be a whole number, at least 1; got {step!r}")
    if step < 1:
        raise ValueError(f"step must be at least 1: the first update of the weights is step 1; got {step}")
    return step


def _check_done(info: Mapping[str, Any], path: Path, step: int) -> None:
    """Raise `ValueError` if a run that is over did not begin this step."""
    done = (info.get("progress") or {}).get("step")
    if done is None:
        return
    outcome = info.get("outcome") or {}
    last = done if outcome.get("kind") in OVER else done + 1  # the step that an error ended was begun
    if step > last:
        raise ValueError(f"the run in {str(path)!r} has no step {step}: it {outcome.get('kind', 'ended')} after step {done}.")


def _failed(rank: int, problem: str) -> Exception:
    return DistributedError(f"rank {rank} cannot repeat the run, so this rank cannot: {problem}")


def newest_before(recorded: RecordedRun, step: int, elsewhere: Sequence[str]) -> tuple[Entry, list[str]]:
    """Return the newest checkpoint on the present branch of a run before a step, verified, and why nearer ones were skipped.

    Args:
        recorded: The run.
        step: The number of the step, from 1. The checkpoint has at most ``step - 1`` complete steps.
        elsewhere: The folders and URLs outside of its directory to which its trainer saves.

    Raises:
        CheckpointError: There is none that can be continued. The message names those that exist.
    """
    catalogue = Catalogue.at(recorded.path, elsewhere)
    line = catalogue.line()
    line += [
        entry for entry in RunSoFar(recorded, elsewhere).begun if Path(entry.path).parent != recorded.checkpoints.absolute()
    ]
    newest, skipped = first_usable((entry for entry in line if entry.saved.step < step), Entry.problem)
    if newest is not None:
        return newest, skipped
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
