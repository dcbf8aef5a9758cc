"""The orders of torch's own samplers, which can be read at any position."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from cadenza.loading.orders import PERMUTED, KeyedOrder, Order, Permutation, Unshuffled
from cadenza.loading.rounds import PositionBatches


def known_batches(sampler: Any, *, batched: bool) -> PositionBatches | None:
    """Return the batches of positions that a sampler yields in an epoch; None for an unknown sampler.

    Known are `SequentialSampler`, and `RandomSampler` without replacement, alone or in a `BatchSampler`, but no subclasses.

    Args:
        sampler: The user's sampler.
        batched: Whether it yields batches of indices. Without it, each index is a batch.
    """
    if not batched:
        return PositionBatches.of(len(sampler), 1) if _is_known(sampler) else None
    if type(sampler) is not BatchSampler or not _is_known(sampler.sampler):
        return None
    inner: Any = sampler.sampler
    samples, size = len(inner), sampler.batch_size
    return PositionBatches.of(samples // size * size if sampler.drop_last else samples, size)


def known_order(
    sampler: Any, generator: torch.Generator | None, seed: int, *, permuted: int = PERMUTED, batched: bool
) -> Order | None:
    """Return the order of the samples in an epoch of a sampler that `known_batches` knows; None for an unknown sampler.

    Args:
        sampler: The user's sampler.
        generator: The seeded generator of the sampler. None: the sampler draws a seed from torch's global generator.
        seed: The seed of torch's global generator, for a sampler that draws from it, and the key of a `KeyedOrder`.
        permuted: The largest number of samples with the sampler's own order. More samples get a `KeyedOrder`.
        batched: Whether the sampler yields batches of indices.
    """
    if known_batches(sampler, batched=batched) is None:
        return None
    inner: Any = sampler.sampler if batched else sampler
    if type(inner) is SequentialSampler:
        return Unshuffled()
    samples = len(inner)
    if samples > permuted:
        return KeyedOrder(samples, seed)
    return Permutation(samples, _generator_of_sampler(generator, seed))


def _is_known(sampler: Any) -> bool:
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _generator_of_sampler(generator: torch.Generator | None, seed: int) -> torch.Generator:
    """Return the generator from which `RandomSampler.__iter__` draws the permutation."""
    if generator is not None:
        return generator
    drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(drawn.item()))
