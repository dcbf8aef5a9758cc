"""Hints for a loader that could be faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Subset, TensorDataset

from cadenza.loading.mixture import Mixture

MIN_FRACTION = 0.3  # of the time: below it, starting workers may cost more than it saves


def loader_hints(loader: Any) -> Iterator[str]:
    """Yield the hints for a loader that the plan shows, before a batch is read.

    A `DataLoader` calls its dataset once for each sample, and then stacks the samples: 151 us for 16 rows of 32 numbers, where
    slicing takes 16.
    """
    if isinstance(loader, Mixture):
        yield from dict.fromkeys(hint for one in loader.loaders.values() for hint in loader_hints(one))
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


def fetching_hint(loader: Any, fraction: float) -> str | None:
    """Return a hint for a training that waited for its data; None if it hardly waited, or if no hint applies.

    Args:
        loader: The training loader.
        fraction: The fraction of the time that went into fetching, from 0 to 1.
    """
    if fraction < MIN_FRACTION or not isinstance(loader, DataLoader) or loader.num_workers:
        return None
    return (
        f"{fraction:.0%} of the time went into fetching, because num_workers=0 loads the data in the training process. Pass "
        "num_workers=2 or more to the DataLoader."
    )
