"""A run that continues with another batch size: its position in the epoch, counted in the new batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from cadenza.checkpoint.other_ranks import Written
from cadenza.engine.session import Session
from cadenza.errors import DataError
from cadenza.loading import num_batches
from cadenza.loading.loaders import length_of
from cadenza.loading.rebuilding import ordered_by_sample
from cadenza.loading.settings import loader_settings
from cadenza.status.counting import counted


def rebatched(session: Session, written: Written, saved: Mapping[str, Any]) -> Written:
    """Return where the run continues: at the same sample. `saved` are the settings of the loader in the checkpoint.

    Raises:
        DataError: No batch of the new size begins at this sample, or the position of the loader is not one in its samples.
    """
    before, now = saved.get("batch_size"), loader_settings(session.loader).get("batch_size")
    at = written.at.batch_in_epoch
    if "batch_size" not in session.given.override or before == now or not isinstance(before, int) or not isinstance(now, int):
        return written
    if not at:
        return written
    batches = num_batches(session.loader, session.driver.data_shard())
    if written.over or at == written.per_epoch:
        return written._replace(at=replace(written.at, batch_in_epoch=batches or at), over=True)
    _check(session, written, before, now)
    return written._replace(at=replace(written.at, batch_in_epoch=at * before // now))


def _check(session: Session, written: Written, before: int, now: int) -> None:
    at, each = written.at.batch_in_epoch, lcm(before, now) // before
    reason = ""
    if not ordered_by_sample(session.loader) or "limit" in loader_settings(session.loader):
        reason = "its loader is not a DataLoader(dataset, batch_size=...) or TensorBatches, so it has no position by sample"
    elif written.ranks != session.driver.data_world_size or written.past:
        reason = "another number of ranks began this epoch: change one of the two, and the other at a later checkpoint"
    elif at * before % now:
        reason = (
            f"{counted(at * before, 'sample')} of each rank are no whole number of batches of {now}. Positions that work: "
            f"any multiple of {counted(each, 'batch')}"
        )
    elif written.ranks > 1 and written.dealt:
        positions = ((before, at), (now, at * before // now))
        if not all(_in_whole_rounds(session, size, rounds) for size, rounds in positions):
            reason = "the last batches of an epoch are split over the ranks by their number"
    if reason:
        raise DataError(
            f"{written.name} lies after {counted(at, 'batch')} of {counted(before, 'sample')} of an epoch, and the run cannot "
            f"continue there with batch_size={now}: {reason}. Continue at a checkpoint from the end of an epoch, or keep "
            f"batch_size={before}. Nothing was restored."
        )


def _in_whole_rounds(session: Session, batch_size: int, rounds: int) -> bool:
    """Return whether each of the first rounds is one batch of each rank. The last two may be split anew."""
    loader, ranks = session.loader, session.driver.data_world_size
    samples = length_of(getattr(loader, "sampler", None)) or int(getattr(loader, "samples", 0))
    batches = samples // batch_size if getattr(loader, "drop_last", False) else -(-samples // batch_size)
    return rounds < batches // ranks or (rounds == batches // ranks and batches % ranks == 0)
