"""The order of a loader as plain data for ``run.json``, and a loader of the same order without its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.mixture import Mixture
from cadenza.loading.sample_counts import uses_torch_iteration
from cadenza.loading.streams import is_sharded_stream
from cadenza.loading.tensors import TensorBatches


def described(loader: Any, rank: int = 0) -> dict[str, Any]:
    """Return all that the order of a loader depends on, apart from the seed of the run, in the same way on each rank.

    Args:
        loader: The loader of a run.
        rank: The rank that reads it. A ``DistributedSampler`` may have been given another one.

    >>> described(DataLoader(range(10), batch_size=4, shuffle=True))
    {'kind': 'data set', 'samples': 10, 'batch_size': 4, 'drop_last': False, 'sampler': {'kind': 'random'}}
    """
    if isinstance(loader, Limited):
        return {"kind": "limited", "count": loader.count, "loader": described(loader.loader, rank)}
    if isinstance(loader, Mixture):
        weights = {} if loader.weights is None else {"weights": loader.weights}
        loaders = {name: described(one, rank) for name, one in loader.loaders.items()}
        return {"kind": "mixture", "mode": loader.mode, "stop": loader.stop, **weights, "loaders": loaders}
    if isinstance(loader, TensorBatches):
        names = ("samples", "batch_size", "drop_last", "shuffle", "seed")
        return {"kind": "tensors", **{name: getattr(loader, name) for name in names}}
    if isinstance(loader, list | tuple) and loader and loader[0] is not None:  # adapters that read the data give [None]
        return {"kind": "list", "batches": len(loader)}
    if is_sharded_stream(loader):
        return {"kind": "stream", "workers": max(loader.num_workers, 1), "shards": len(loader.dataset.shards())}
    if isinstance(loader, DataLoader):
        return _of_data_loader(loader, rank)
    return _other(loader, f"a {type(loader).__name__} yields batches, and no indices")


def _of_data_loader(loader: DataLoader[Any], rank: int) -> dict[str, Any]:
    name = type(loader).__name__
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _other(loader, f"a {name} has its own position, and no indices")
    if isinstance(loader.dataset, IterableDataset):
        return _other(loader, f"a stream ({type(loader.dataset).__name__}) has no indices")
    if not uses_torch_iteration(loader):
        return _other(loader, f"a {name} has an iteration of its own")
    batches, samples = loader.batch_sampler, length_of(loader.dataset)
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    own = batches if batches is not None and type(batches) is not BatchSampler else sampler
    settings = {"samples": samples, "batch_size": getattr(batches, "batch_size", None)}
    settings["drop_last"] = bool(getattr(batches, "drop_last", False))
    drawn = None if own is batches or samples is None else _of_sampler(sampler, rank)
    if drawn is not None:
        return {"kind": "data set", **settings, "sampler": drawn}
    why = f"a {type(own).__name__} draws the indices, and run.json does not have its order"
    return {"kind": "unknown order", **settings, "batches": length_of(loader), "why": why}


def _of_sampler(sampler: Any, rank: int) -> dict[str, Any] | None:
    """Return the settings of a sampler of torch; None for any other."""
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is RandomSampler:
        generator = sampler.generator
        seed = {} if generator is None else {"seed": generator.initial_seed()}
        number = {} if sampler.num_samples == len(sampler.data_source) else {"num_samples": sampler.num_samples}
        return {"kind": "random", **({"replacement": True} if sampler.replacement else {}), **number, **seed}
    if type(sampler) is DistributedSampler:
        names = ("num_replicas", "shuffle", "seed", "drop_last")
        first = (sampler.rank - rank) % sampler.num_replicas
        return {
            "kind": "distributed",
            **{name: getattr(sampler, name) for name in names},
            **({"first": first} if first else {}),
        }
    return None


def _other(loader: Any, why: str) -> dict[str, Any]:
    return {"kind": "other", "batches": length_of(loader), "why": why}


def rebuilt(description: Mapping[str, Any], rank: int) -> Any:
    """Return a loader of the described order. It holds no data.

    Args:
        description: The result of `described`.
        rank: The rank that reads it, for a ``DistributedSampler``.
    """
    kind = description["kind"]
    if kind == "limited":
        return Limited(rebuilt(description["loader"], rank), description["count"])
    if kind == "mixture":
        loaders = {name: rebuilt(one, rank) for name, one in description["loaders"].items()}
        return Mixture(loaders, description["mode"], weights=description.get("weights"), stop=description["stop"])
    if kind == "tensors":
        options = {name: description[name] for name in ("batch_size", "drop_last", "shuffle", "seed")}
        return TensorBatches(torch.empty(description["samples"], 0), **options)
    if kind == "list":
        return [0] * description["batches"]
    if kind == "data set":
        return _data_loader(description, rank)
    return _Without(description.get("batches"))


def _data_loader(description: Mapping[str, Any], rank: int) -> DataLoader[Any]:
    samples: Any = range(description["samples"])
    settings, size = description["sampler"], description["batch_size"]
    generator = torch.Generator().manual_seed(settings["seed"]) if "seed" in settings else None
    sampler: Any
    if settings["kind"] == "sequential":
        sampler = SequentialSampler(samples)
    elif settings["kind"] == "distributed":
        options = {name: settings[name] for name in ("num_replicas", "shuffle", "seed", "drop_last")}
        part = (settings.get("first", 0) + rank) % settings["num_replicas"]
        sampler = DistributedSampler(samples, rank=part, **options)
    else:
        number = settings.get("num_samples")
        sampler = RandomSampler(samples, settings.get("replacement", False), number, generator)
    if size is None:
        return DataLoader(samples, batch_size=None, sampler=sampler)
    return DataLoader(samples, batch_sampler=BatchSampler(sampler, size, description["drop_last"]))


class _Without:
    """Stands for a loader without indices."""

    def __init__(self, batches: int | None) -> None:
        self._batches = batches

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("this loader has no length")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return iter(())
