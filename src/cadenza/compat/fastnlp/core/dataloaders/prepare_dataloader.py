"""A loader of a data set, or loaders of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from cadenza.compat.fastnlp.core.dataloaders.torch_dataloader import prepare_torch_dataloader


def prepare_dataloader(
    dataset: Any,
    batch_size: int = 16,
    shuffle: bool | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | Literal["auto"] | None = "auto",
    num_workers: int = 0,
    backend: Literal["auto", "torch"] = "auto",
) -> Any:
    """Return a loader of a data set, or for a mapping of data sets a dictionary of loaders.

    Args:
        dataset: A `DataSet`, another data set with ``__getitem__`` and ``__len__``, or a mapping of data sets; also an object
            with such a mapping in its attribute ``datasets``.
        batch_size: Samples in a batch.
        shuffle: Shuffle in each epoch. None: only data sets of a mapping with ``train`` in their names.
        drop_last: Drop a smaller last batch.
        collate_fn: Collates a list of samples; ``"auto"`` pads, see `Collator`; None uses torch's default.
        num_workers: The number of worker processes.
        backend: ``"auto"`` or ``"torch"``.

    Raises:
        ValueError: `backend` is unknown.
    """
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend must be 'auto' or 'torch'; got {backend!r}")
    return prepare_torch_dataloader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
    )
