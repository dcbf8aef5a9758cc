"""Loaders as created by pytorch-accelerated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader


def kwargs_for(defaults: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a loader. Each argument in `given` replaces a default.

    Raises:
        TypeError: `defaults` or `given` is not a mapping.
    """
    for arguments in (defaults, {} if given is None else given):
        if not isinstance(arguments, Mapping):
            raise TypeError(f"the arguments of a loader must be a mapping of names to values; got {arguments!r}")
    given = dict(given or {})
    kept = dict(defaults)
    if "sampler" in given or "batch_sampler" in given:
        kept.pop("shuffle", None)  # the sampler defines the order
    if "batch_sampler" in given:
        kept.pop("batch_size", None)
    return {**kept, **given}


def check_dataset(dataset: Any) -> None:
    """Check that a loader can be created for a data set.

    Raises:
        TypeError: `dataset` is a loader, or not a data set.
    """
    if dataset is None or isinstance(dataset, int | float | str):
        raise TypeError(f"expected a data set, with __getitem__ and __len__ or with __iter__; got {dataset!r}")
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "expected a data set; got a DataLoader. Pass its dataset, and its arguments as train_dataloader_kwargs or "
            "eval_dataloader_kwargs; or override create_train_dataloader to return a loader of your own."
        )


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the first two parts of a batch.

    Raises:
        TypeError: The batch cannot be indexed, or has fewer than two parts.
    """
    try:
        return batch[0], batch[1]
    except (KeyError, IndexError, TypeError) as error:
        shown = f"a mapping with {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise TypeError(
            f"a batch must be (inputs, targets); got {shown}. Override calculate_train_batch_loss and "
            "calculate_eval_batch_loss for batches of another form."
        ) from error
