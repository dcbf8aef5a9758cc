"""The settings of a loader: read to compare them at a resume, changed to another batch size, and hints for faster ones."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from cadenza.loading.batches import size_of
from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.resumable_base import Composite
from cadenza.loading.tensors import TensorBatches

CLASS_NAMES = ("loader", "data set")  # class names, which may change although the samples do not


def loader_settings(loader: Any) -> dict[str, Any]:
    """Return the settings of a training loader, by the name of the argument that sets each.

    >>> loader_settings(DataLoader(range(10), batch_size=4, shuffle=True))
    {'loader': 'DataLoader', 'data set': 'range', 'samples': 10, 'batch_size': 4, 'drop_last': False, 'shuffle': True}
    """
    if isinstance(loader, Limited):
        return {**loader_settings(loader.loader), "limit": loader.count}
    if isinstance(loader, Composite):
        return loader.settings()
    settings: dict[str, Any] = {"loader": type(loader).__name__}
    if isinstance(loader, list | tuple):
        return {**settings, "batch_size": size_of(loader[0])} if loader else settings
    if isinstance(loader, TensorBatches):
        names = ("samples", "batch_size", "drop_last", "shuffle", "seed")
        return settings | {name: value for name in names if (value := getattr(loader, name)) is not None}
    dataset = getattr(loader, "dataset", None)
    settings |= {} if dataset is None else {"data set": type(dataset).__name__}
    if (samples := length_of(dataset)) is not None:
        settings["samples"] = samples
    if not isinstance(loader, DataLoader):
        return settings | _plain_of(loader, "batch_size", "drop_last", "shuffle")
    return settings | _sampling(loader)


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    batches, sampler = loader.batch_sampler, loader.sampler
    own = batches is not None and type(batches) is not BatchSampler
    settings: dict[str, Any] = {"batch_sampler": type(batches).__name__} if own else {}
    settings |= _plain_of(batches if own else loader, "batch_size", "drop_last")
    sampler = getattr(batches, "sampler", sampler) if own else sampler
    if type(sampler) in (RandomSampler, SequentialSampler):
        settings["shuffle"] = type(sampler) is RandomSampler
        if getattr(sampler, "replacement", False):
            settings |= {"replacement": True, **_plain_of(sampler, "num_samples")}
    elif not own and not isinstance(loader.dataset, IterableDataset):
        settings |= {"sampler": type(sampler).__name__, **_plain_of(sampler, "shuffle", "replacement")}
        seeds = _plain_of(sampler, "seed")
        settings |= {"sampler seed": seeds["seed"]} if seeds else {}
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator) and type(sampler) is RandomSampler:
        settings["generator seed"] = generator.initial_seed()
    return settings


def _plain_of(part: object, *names: str) -> dict[str, Any]:
    values = {name: getattr(part, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | str)}


MIN_FRACTION = 0.3  # of the time: below it, starting workers may cost more than it saves


_MANY = 1000  # samples, from which on a hint is worth a line


def loader_hints(loader: Any) -> Iterator[str]:
    """Yield the hints for a loader that the plan shows, before a batch is read.

    A `DataLoader` calls its dataset once for each sample, and then stacks the samples: 151 us for 16 rows of 32 numbers, where
    slicing takes 16.
    """
    if isinstance(loader, Composite):
        yield from dict.fromkeys(hint for value in loader.loaders.values() for hint in loader_hints(value))
    if not isinstance(loader, DataLoader):
        return
    data = loader.dataset
    while isinstance(data, Subset):
        data = data.dataset
    if type(data) is TensorDataset and len(data) >= _MANY:
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
    names = ("sampler", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator")
    return DataLoader(loader.dataset, batch_size=batch_size, **{name: getattr(loader, name) for name in (*names, *workers)})


def ordered_by_sample(loader: Any) -> bool:
    """Return whether the order of the samples does not depend on the batch size: batches are cut from one sequence."""
    if isinstance(loader, Limited):
        return ordered_by_sample(loader.loader)
    plain = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    return plain or isinstance(loader, TensorBatches)
