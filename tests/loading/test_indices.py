"""The order of torch's own samplers is drawn without a Python integer for each sample, and is the same."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from cadenza.loading.indices import known_batches, known_order
from cadenza.loading.rng import seed_host
from cadenza.loading.seeded import ResumableSampler

N = 2500


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Any] = {
    "random": lambda g: RandomSampler(range(N), generator=g),
    "in order": lambda g: SequentialSampler(range(N)),
    "random batches": lambda g: BatchSampler(RandomSampler(range(N), generator=g), 16, False),
    "random whole batches": lambda g: BatchSampler(RandomSampler(range(N), generator=g), 16, True),
    "batches in order": lambda g: BatchSampler(SequentialSampler(range(N)), 7, False),
}


def read(sampler: Any, generator: torch.Generator | None, skip: int, *, batched: bool) -> list[Any]:
    """Return what a known sampler yields from number `skip` on, with the seed 5."""
    batches, order = known_batches(sampler, batched=batched), known_order(sampler, generator, 5, batched=batched)
    assert batches is not None
    assert order is not None
    drawn = [order.at(batches[number]).tolist() for number in range(skip, len(batches))]
    return drawn if batched else [index for (index,) in drawn]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("given", [True, False], ids=["a generator of its own", "the global generator"])
def test_the_order_is_that_of_the_sampler(name: str, given: bool) -> None:
    seed_host(5)
    whole = list(SAMPLERS[name](generator_of(5) if given else None))
    for skip in (0, 1, 100, len(whole)):
        assert read(SAMPLERS[name](None), generator_of(5) if given else None, skip, batched="batches" in name) == whole[skip:]


class Mine(RandomSampler):
    """A subclass with another order."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(super().__iter__()))


class MineInBatches(BatchSampler):
    """A subclass with the same order."""


@pytest.mark.parametrize(
    "sampler",
    [
        Mine(range(N)),
        RandomSampler(range(N), replacement=True),
        RandomSampler(range(N), num_samples=7),
        BatchSampler(Mine(range(N)), 4, False),
        MineInBatches(SequentialSampler(range(N)), 4, False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_any_other_sampler_is_iterated(sampler: Any) -> None:
    assert known_batches(sampler, batched=isinstance(sampler, BatchSampler)) is None
    assert known_order(sampler, None, 5, batched=isinstance(sampler, BatchSampler)) is None
    assert len(list(ResumableSampler(sampler, 1, batched=isinstance(sampler, BatchSampler)))) == len(sampler)


def test_an_epoch_of_a_million_samples_starts_without_a_list_of_them() -> None:
    order = ResumableSampler(BatchSampler(RandomSampler(range(10**6)), 32, False), 1)
    order.skip = 1000
    tracemalloc.start()
    try:
        first = next(iter(order))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(first.index) == 32
    assert peak < 100_000, f"{peak} bytes of Python objects"
