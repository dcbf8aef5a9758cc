"""A loader of a data set, or loaders of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        dataset: A `DataSet`, any other data set with ``__getitem__`` and ``__len__``, or a mapping of such.
        batch_size: Samples in a batch.
        shuffle: Mix the samples, anew in each epoch. None: in a mapping those whose name has ``train`` in it, else not.
        drop_last: Leave out a last batch that is smaller.
        collate_fn: Makes a batch of a list of samples; ``"auto"`` pads, see `Collator`; None does what torch does.
        num_workers: Processes that load.
        backend: ``"auto"`` or ``"torch"``: there is no other here.

    Raises:
        ValueError: Another `backend`.
    """
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend must be 'auto' or 'torch'; got {backend!r}: Cadenza trains with torch")
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    options |= {"collate_fn": collate_fn, "num_workers": num_workers}
    if isinstance(dataset, Mapping):
        return {
            name: prepare_torch_dataloader(one, shuffle="train" in name if shuffle is None else shuffle, **options)
            for name, one in dataset.items()
        }
    return prepare_torch_dataloader(dataset, shuffle=bool(shuffle), **options)
