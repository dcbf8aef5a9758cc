"""Data on a thousand ranks: what a rank computes and holds does not grow with the ranks, the samples or the position."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cadenza.loading import Consumed, Shard, TensorBatches, num_batches, resumable
from cadenza.loading.seeded import ResumableSampler
from cadenza.loading.shards import CHUNK, PERMUTED, PositionBatches, RankBatches, batches_of_rank

BILLION = 10**9


class Created(TorchDispatchMode):
    """Adds up the bytes of all tensors that are created, whether they are kept or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, list | tuple) else [results]:
            self.bytes += one.untyped_storage().nbytes() if isinstance(one, Tensor) and not func.is_view else 0
        return results


def bytes_of(read: Callable[[], object]) -> int:
    """Return the bytes of all tensors that are created, plus the peak of the Python objects."""
    with Created():
        next(iter(sampler(100, Shard(), permuted=0)))  # what torch loads on first use
    tracemalloc.start()
    try:
        with Created() as created:
            read()
        total: int = created.bytes + tracemalloc.get_traced_memory()[1]
        return total
    finally:
        tracemalloc.stop()


def calls_of(read: Callable[[], object]) -> int:
    """Return the number of functions that are called, Python's and C's."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        read()
    finally:
        sys.setprofile(None)
    return count


def sampler(samples: int, shard: Shard, *, skip: int = 0, shuffle: bool = True, **options: Any) -> ResumableSampler:
    inner = RandomSampler(range(samples)) if shuffle else SequentialSampler(range(samples))
    result = ResumableSampler(BatchSampler(inner, 32, False), 1, shard, **options)
    result.skip = skip
    return result


def listed(sampler: ResumableSampler) -> list[int]:
    return list(chain.from_iterable(request.index for request in sampler))


# -- what a rank computes --------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [PERMUTED, BILLION])
def test_a_rank_of_4096_calls_as_many_functions_for_its_batches_as_one_of_2(samples: int, shuffle: bool) -> None:
    def calls(ranks: int, skip: int) -> int:
        reading = iter(sampler(samples, Shard(ranks // 2, ranks), skip=skip, shuffle=shuffle))
        next(reading)
        return calls_of(lambda: list(islice(reading, 5)))

    counts = {calls(ranks, skip) for ranks in (2, 1024, 4096) for skip in (0, 2)}
    assert len(counts) == 1
    assert counts.pop() < 5 * 40


@pytest.mark.parametrize("ranks", [1024, 4096])
@pytest.mark.parametrize("position", [0, 0.5])
def test_the_first_batch_of_a_billion_samples_takes_less_than_a_megabyte(ranks: int, position: float) -> None:
    skip = int(position * BILLION / 32 / ranks)
    assert bytes_of(lambda: next(iter(sampler(BILLION, Shard(ranks - 1, ranks), skip=skip)))) < 1e6
    assert bytes_of(lambda: next(iter(sampler(BILLION, Shard(ranks - 1, ranks), skip=skip, shuffle=False)))) < 1e5


def test_the_largest_permutation_takes_less_than_ten_megabytes() -> None:
    assert 8 * PERMUTED < bytes_of(lambda: next(iter(sampler(PERMUTED, Shard(7, 1024))))) < 10e6


def test_a_batch_computes_its_own_indices_up_to_a_chunk_that_several_batches_use() -> None:
    reading = iter(sampler(BILLION, Shard(7, 1024)))
    next(reading)
    used = bytes_of(lambda: list(islice(reading, CHUNK // 32 - 1)))
    assert used < 50_000, "the rest of the chunk is computed"
    mapped = bytes_of(lambda: next(reading))
    assert mapped < 130 * 8 * CHUNK, "130 operations on 1024 numbers"


def test_a_billion_rows_in_memory_are_read_in_the_middle_at_once() -> None:
    rows = torch.zeros(1).expand(BILLION)
    source = resumable(TensorBatches(rows, batch_size=32, shuffle=True), 1, shard=Shard(1000, 1024))
    assert bytes_of(lambda: next(source.batches(3, 15_000))) < 1e6


# -- every sample once -------------------------------------------------------------------------------

CASES: list[tuple[int, int, int, Consumed]] = [  # samples, batch size, ranks, consumed
    (1024 * 32 * 3, 32, 1024, ()),
    (1024 * 32 * 3 + 1, 32, 1024, ()),
    (100_003, 7, 1024, ((4096, 1), (3, 100))),
    (99_991, 8, 4096, ()),
    (65_537, 8, 4096, ((1024, 3), (512, 2), (1, 5))),
    (4097, 1, 4096, ()),
    (5000, 2, 4096, ((1, 1000),)),
    (30_000, 4, 1024, ((1024, 6),)),
]


@pytest.mark.parametrize(("samples", "size", "ranks", "consumed"), CASES)
def test_over_all_ranks_each_position_is_read_once(samples: int, size: int, ranks: int, consumed: Consumed) -> None:
    read: list[range] = []
    batches, past = PositionBatches.of(samples, size), 0
    for number, (world_size, done) in enumerate(consumed):
        everyone = shards_of(batches, world_size, consumed[:number])
        read += [own[index] for index in range(done) for own in everyone]
        past += done
    everyone = shards_of(batches, ranks, consumed)
    assert len({len(own) for own in everyone}) == 1
    for own in everyone[:1] if everyone[0].replicated_at == past else everyone:
        read += own.since(0)
    read.sort(key=lambda positions: positions.start)
    assert [one.start for one in read] == [0, *(one.stop for one in read[:-1])]
    assert read[-1].stop == samples
    assert all(read), "a rank has no sample"


def shards_of(batches: PositionBatches, ranks: int, consumed: Consumed) -> list[RankBatches]:
    return [batches_of_rank(batches, Shard(rank, ranks, consumed=consumed)) for rank in range(ranks)]


@pytest.mark.parametrize("permuted", [0, PERMUTED])
def test_over_1024_ranks_each_sample_of_a_shuffled_epoch_is_read_once(permuted: int) -> None:
    samples = 1024 * 32 + 999
    seen = Counter(chain.from_iterable(listed(sampler(samples, Shard(rank, 1024), permuted=permuted)) for rank in range(1024)))
    assert seen == Counter(range(samples))


def test_the_length_on_4096_ranks_is_known_without_reading() -> None:
    loader: DataLoader[int] = DataLoader(range(BILLION), 32, shuffle=True)  # type: ignore[arg-type]
    assert num_batches(loader, Shard(0, 4096)) == 7630
    resumed = Shard(0, 4096, consumed=((1024, 15_000), (8, 100)))
    assert calls_of(lambda: num_batches(loader, resumed)) < 300
    assert num_batches(loader, resumed) == 15_100 + -(-(BILLION // 32 - 1024 * 15_000 - 800) // 4096)


class Parts(IterableDataset[int]):
    """One sample in each of 8200 shards, and the numbers of those that were opened."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def shards(self) -> range:
        return range(8200)

    def read_shard(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append(shard)
        return iter([shard][start:])

    def __iter__(self) -> Iterator[int]:
        return iter(self.shards())


@pytest.mark.parametrize("rank", [0, 7, 8, 4095])
def test_a_rank_of_4096_opens_its_own_two_or_three_shards(rank: int) -> None:
    parts = Parts()
    source = resumable(DataLoader(parts, 1), 1, shard=Shard(rank, 4096, any_rank=bool))
    read = [int(batch) for batch in source.batches(0, 0)]
    assert parts.opened == read == list(range(rank, 8200, 4096))
