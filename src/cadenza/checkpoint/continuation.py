"""The point at which a run would continue: it is found and read; nothing is restored, written or locked."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from cadenza.checkpoint.other_ranks import Written
from cadenza.checkpoint.resuming import chosen, is_over
from cadenza.checkpoint.snapshot import check_whole
from cadenza.engine.course import Beginning
from cadenza.hooks.dispatch import Hooks
from cadenza.loading import resumable
from cadenza.loading.shards import Shard
from cadenza.records.directory import RecordedRun
from cadenza.status.progress import Progress


def beginning(
    resume: bool | str | PathLike[str],
    directory: Path | None,
    elsewhere: Iterable[str | PathLike[str]],
    hooks: Hooks,
    progress: Progress,
    loader: Iterable[object],
    shard: Shard,
) -> Beginning:
    """Move `hooks` and `progress` to the point at which ``fit(resume=...)`` continues, and return where that is.

    Args:
        resume: As for ``fit``.
        directory: The run directory, if there is one.
        elsewhere: Further folders and URLs that the run saves to.
        hooks: The callbacks of a run that does not begin: the timers of their schedules are moved.
        progress: The limits of the run.
        loader: The training loader.
        shard: The shard that this rank reads.

    Raises:
        CheckpointError: No checkpoint can be used; or the loader has another number of batches.
        DataError: This number of ranks cannot continue inside the epoch.
    """
    recorded = None if directory is None else RecordedRun(directory)
    start = chosen(resume, recorded, elsewhere)
    if is_over(recorded, progress, start):
        return Beginning(stops=True)
    if start.loaded is None:
        return Beginning()
    check_whole(start.loaded)
    state, written = start.loaded.state, Written.read(start.loaded.name, start.loaded.state)
    reads = resumable(loader, 0, shard=shard).shard
    written.check_length(loader, reads, progress.batches_said)
    written.check_position(reads)
    past = written.restore_counters(progress, loader, shard)
    hooks.restore_schedules(state.get("schedules", {}), progress)
    interrupted = start.loaded.by_rank[0].get("evaluations due") or {}
    requests = state["requests"]
    ends = "end_epoch" in requests or state["exhausted"] or (written.over and shard.world_size != written.ranks)
    return Beginning(
        in_epoch=state["in_epoch"],
        leaves=ends or "stop" in requests,
        counts=ends,
        stops="stop" in requests,
        sized=not past and progress.corrected is None,
        due=interrupted.get("names", ()),
    )
