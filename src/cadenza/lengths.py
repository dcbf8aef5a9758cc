"""A loader that has another number of batches than its length says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.run import Run


def check(run: Run) -> None:
    """Compare a whole epoch with the loader's length, and count with what was found; all ranks find the same."""
    progress = run.progress
    expected, found = progress.batches_per_epoch, progress.batch_in_epoch
    taken_over = expected != progress.batches_per_whole_epoch  # an epoch that another number of ranks began
    if not run.exhausted or expected is None or expected == found or taken_over:
        return
    first = progress.batches_said == expected
    progress.correct(found)
    whose = " on each rank" if run.driver.world_size > 1 else ""
    what = f"the length of the training loader says {expected} batches{whose}, and epoch {progress.epoch + 1} had {found}"
    run.decide("length corrected", what, who="the run")
    if first and run.is_main:
        run.warn(
            f"{what}. Fractions of an epoch and the length of the run count with {found} from now on; schedules and warm-ups "
            f"that were made for {expected} stay as they are. Have the loader's __len__ return the right number, or remove it."
        )


def found(run: Run) -> int | None:
    """Return how many batches an epoch has, if that is another number than the loader's length says; else None."""
    progress = run.progress
    return None if progress.batches_per_whole_epoch == progress.batches_said else progress.batches_per_whole_epoch
