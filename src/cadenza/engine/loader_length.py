"""Correct the number of batches of a loader with a wrong length, and name a loader without batches."""

from __future__ import annotations

from cadenza.engine.session import Session
from cadenza.status.formats import counted
from cadenza.status.progress import Progress


def check(session: Session) -> None:
    """Compare a whole epoch with the length of the loader, and correct the length. All ranks find the same number."""
    progress = session.progress
    expected, found = progress.batches_per_epoch, progress.batch_in_epoch
    taken_over = expected != progress.batches_per_whole_epoch  # another number of ranks began this epoch
    if not session.cursor.exhausted or expected is None or expected == found or taken_over:
        return
    first = progress.batches_said == expected
    progress.correct(found)
    ranks = " on each rank" if session.driver.world_size > 1 else ""
    said = f"{counted(expected, 'batch')}{ranks}"
    what = f"the length of the training loader says {said}, but epoch {progress.epoch + 1} had {found}"
    session.decide("length corrected", what, who="the run", data={"expected_batches": expected, "batches": found})
    if first and session.is_main:
        session.warn(
            f"{what}. From now on, fractions of an epoch and the length of the run are computed with {found}. Schedules and "
            f"warm-ups that were made for {expected} do not change. Make the loader's __len__ return the right "
            "number, or remove it."
        )


def no_batches(progress: Progress) -> str:
    """Return the message of an epoch without a batch."""
    again = "" if progress.epoch == 0 else " again: an iterator is used up after one pass, a loader is not"
    return (
        f"the training loader gave no batch in epoch {progress.epoch + 1}. Give one that has at least one batch"
        f"{again}; with drop_last=True a data set smaller than a batch has none."
    )
