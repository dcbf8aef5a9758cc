"""The indices of torch's own samplers, without a Python integer for each sample of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

CHUNK = 1024  # indices that are converted to Python integers at a time, if they are read one by one


def fast_indices(
    sampler: Any, generator: torch.Generator | None, seed: int, skip: int, *, batched: bool
) -> Iterator[Any] | None:
    """Return the items of a sampler from number `skip` on, in the sampler's own order; None for an unknown sampler.

    Known are `SequentialSampler`, and `RandomSampler` without replacement, alone or in a `BatchSampler`, but no subclasses. The
    permutation of an epoch stays a tensor, and skipped items are not read.

    Args:
        sampler: The user's sampler.
        generator: The seeded generator of the sampler. None: the sampler draws a seed from torch's global generator.
        seed: The seed of torch's global generator, for a sampler that draws from it.
        skip: The number of batches to skip or, without `batched`, of indices.
        batched: Whether the sampler yields batches of indices.
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
        order: range | Tensor = range(count)
    elif type(inner) is RandomSampler and not inner.replacement and inner.num_samples == len(inner.data_source):
        count = inner.num_samples
        order = torch.randperm(count, generator=_generator_of_sampler(generator, seed))
    else:
        return None
    end = count if end is None else end
    return _batches(order, skip * size, end, size) if batched else _one_by_one(order, skip, end)


def _generator_of_sampler(generator: torch.Generator | None, seed: int) -> torch.Generator:
    """Return the generator from which `RandomSampler.__iter__` draws the permutation."""
    if generator is not None:
        return generator
    drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(drawn.item()))


def _batches(order: range | Tensor, first: int, end: int, size: int) -> Iterator[list[int]]:
    for start in range(first, end, size):
        yield _as_list(order[start : min(start + size, end)])


def _one_by_one(order: range | Tensor, first: int, end: int) -> Iterator[int]:
    for start in range(first, end, CHUNK):
        yield from _as_list(order[start : min(start + CHUNK, end)])


def _as_list(indices: range | Tensor) -> list[int]:
    listed: list[int] = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    return listed
