"""The settings of a loader, without reading it. A run that resumes compares them with those in the checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cadenza.loading.batches import size_of
from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.mixture import Mixture
from cadenza.loading.tensors import TensorBatches

CLASS_NAMES = ("loader", "data set")  # class names, which may change although the samples do not


def loader_settings(loader: Any) -> dict[str, Any]:
    """Return the settings of a training loader, by the name of the argument that sets each.

    >>> loader_settings(DataLoader(range(10), batch_size=4, shuffle=True))
    {'loader': 'DataLoader', 'data set': 'range', 'samples': 10, 'batch_size': 4, 'drop_last': False, 'shuffle': True}
    """
    if isinstance(loader, Limited):
        return {**loader_settings(loader.loader), "limit": loader.count}
    if isinstance(loader, Mixture):
        return _of_mixture(loader)
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


def _of_mixture(mixture: Mixture) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "loader": "Mixture",
        "loaders": list(mixture.loaders),
        "mode": mixture.mode,
        "stop": mixture.stop,
    }
    settings |= {} if mixture.weights is None else {"weights": list(mixture.weights.values())}
    for name, loader in mixture.loaders.items():
        own = loader_settings(loader)
        settings |= {f"{name}/{key}": value for key, value in own.items() if key not in CLASS_NAMES}
    return settings


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
