"""The indices of torch's own samplers, without a Python number for each sample of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

AT_ONCE = 1024  # indices that are made numbers at a time, where they are read one by one


def quick_indices(
    sampler: Any, generator: torch.Generator | None, seed: int, skip: int, *, batched: bool
) -> Iterator[Any] | None:
    """Return what a sampler gives from its number `skip` on, in its own order; None if that is for the sampler to say.

    Known are `SequentialSampler`, and `RandomSampler` without replacement, alone or in a `BatchSampler`: the permutation of an
    epoch stays a tensor, and what is skipped is not looked at. Subclasses do as they like.

    Args:
        sampler: The user's.
        generator: The one the sampler draws from, seeded; None: it draws a seed from torch's global generator.
        seed: Of torch's global generator, if the sampler draws from it.
        skip: Batches or, without `batched`, indices.
        batched: Whether it gives batches of indices.
    """
    inner: Any = sampler
    size, end = 1, None
    if batched:
        if type(sampler) is not BatchSampler:
            return None
        inner, size = sampler.sampler, sampler.batch_size
        end = len(inner) // size * size if sampler.drop_last else None
    if type(inner) is SequentialSampler:
        count = len(inner)
        places: range | Tensor = range(count)
    elif type(inner) is RandomSampler and not inner.replacement and inner.num_samples == len(inner.data_source):
        count = inner.num_samples
        places = torch.randperm(count, generator=_as_the_sampler_does(generator, seed))
    else:
        return None
    end = count if end is None else end
    return _batches(places, skip * size, end, size) if batched else _one_by_one(places, skip, end)


def _as_the_sampler_does(generator: torch.Generator | None, seed: int) -> torch.Generator:
    """Return the generator from which `RandomSampler.__iter__` draws the permutation."""
    if generator is not None:
        return generator
    drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(drawn.item()))


def _batches(places: range | Tensor, first: int, end: int, size: int) -> Iterator[list[int]]:
    for start in range(first, end, size):
        yield _listed(places[start : min(start + size, end)])


def _one_by_one(places: range | Tensor, first: int, end: int) -> Iterator[int]:
    for start in range(first, end, AT_ONCE):
        yield from _listed(places[start : min(start + AT_ONCE, end)])


def _listed(places: range | Tensor) -> list[int]:
    listed: list[int] = places.tolist() if isinstance(places, Tensor) else list(places)
    return listed
