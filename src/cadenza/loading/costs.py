"""What is known to make reading data slow, before a batch is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Subset, TensorDataset

MUCH = 0.3  # of the time: below, the start of workers may cost more than it brings


def slow_loading(loader: Any) -> Iterator[str]:
    """Yield what a plan says of a loader that could be faster.

    A `DataLoader` calls its data set once for each sample and stacks what it gets: 151 us for 16 rows of 32 numbers, where
    taking the rows at once takes 16.
    """
    if not isinstance(loader, DataLoader):
        return
    data = loader.dataset
    while isinstance(data, Subset):
        data = data.dataset
    if type(data) is TensorDataset:
        yield (
            "! the loader takes samples one by one from tensors that are in memory: "
            "cadenza.loading.TensorBatches takes a batch at once, several times as fast"
        )


def slow_fetching(loader: Any, share: float) -> str | None:
    """Return what to do if the training waited for its data; None if it is not known, or it hardly did.

    Args:
        loader: The training loader.
        share: The part of the time that went into fetching, from 0 to 1.
    """
    if share < MUCH or not isinstance(loader, DataLoader) or loader.num_workers:
        return None
    return (
        f"{share:.0%} of the time went into fetching, and num_workers=0 does that in the training's own process: give the "
        "DataLoader num_workers=2 or more, which the training then waits for less"
    )
