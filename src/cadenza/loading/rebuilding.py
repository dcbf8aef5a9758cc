"""Build a loader again with another batch size."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from cadenza.loading.loaders import Limited
from cadenza.loading.tensors import TensorBatches


def with_batch_size(loader: Any, batch_size: int) -> Any:
    """Return a loader of the same samples in the same order, in batches of another size; `loader` if it has this size already.

    Args:
        loader: A `DataLoader` that was made with ``batch_size=``, or `TensorBatches`. It is not changed.
        batch_size: The number of samples in a batch.

    Raises:
        ValueError: The loader is of another kind.

    >>> again = with_batch_size(DataLoader(range(10), batch_size=4), 5)
    >>> [batch.tolist() for batch in again]
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    """
    if isinstance(loader, Limited):
        return Limited(with_batch_size(loader.loader, batch_size), loader.count)
    if getattr(loader, "batch_size", None) == batch_size:
        return loader
    if isinstance(loader, TensorBatches):
        again = copy(loader)
        again.batch_size = batch_size
        return again
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"override gives batch_size={batch_size}, but a {type(loader).__name__} cannot be built again: expected a "
            "DataLoader(dataset, batch_size=...) or TensorBatches. Give the trainer a loader of this batch size, and "
            'fit(resume=..., override=("batch_size",)).'
        )
    workers = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order") if loader.num_workers else ()
    names = (
        "sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "generator",
        *workers,
    )
    return DataLoader(loader.dataset, batch_size=batch_size, **{name: getattr(loader, name) for name in (*names, *workers)})


def ordered_by_sample(loader: Any) -> bool:
    """Return whether the order of the samples does not depend on the batch size: batches are cut from one sequence."""
    if isinstance(loader, Limited):
        return ordered_by_sample(loader.loader)
    plain = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    return plain or isinstance(loader, TensorBatches)
