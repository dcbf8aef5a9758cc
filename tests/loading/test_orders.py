"""The order of an epoch: that of torch's samplers for up to 2**20 samples, and above it a bijection that takes no memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from math import sqrt
from pathlib import Path
from sys import maxsize
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint
from cadenza.engine.session import session_of
from cadenza.loading import ResumableLoader, Shard, TensorBatches, resumable
from cadenza.loading.rng import derive_seed, seed_host
from cadenza.loading.seeded import ResumableSampler, known_epoch
from cadenza.loading.shards import PERMUTED, KeyedOrder, Order, Permutation
from cadenza.testing import tiny_trainer
from tests.loading.data import Numbers, loader_of, plain, seeded
from tests.long import LONG

N = 2500


SAMPLERS: dict[str, Any] = {
    "random": lambda g: RandomSampler(range(N), generator=g),
    "in order": lambda g: SequentialSampler(range(N)),
    "random batches": lambda g: BatchSampler(RandomSampler(range(N), generator=g), 16, False),
    "random whole batches": lambda g: BatchSampler(RandomSampler(range(N), generator=g), 16, True),
    "batches in order": lambda g: BatchSampler(SequentialSampler(range(N)), 7, False),
}


def read(sampler: Any, generator: torch.Generator | None, skip: int, *, batched: bool) -> list[Any]:
    """Return what a known sampler yields from number `skip` on, with the seed 5."""
    known = known_epoch(sampler, generator, 5, batched=batched)
    assert known is not None
    batches, order = known
    drawn = [order.at(batches[number]).tolist() for number in range(skip, len(batches))]
    return drawn if batched else [index for (index,) in drawn]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("given", [True, False], ids=["a generator of its own", "the global generator"])
def test_the_order_is_that_of_the_sampler(name: str, given: bool) -> None:
    seed_host(5)
    whole = list(SAMPLERS[name](seeded(5) if given else None))
    for skip in (0, 1, 100, len(whole)):
        assert read(SAMPLERS[name](None), seeded(5) if given else None, skip, batched="batches" in name) == whole[skip:]


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
    batched = isinstance(sampler, BatchSampler)
    assert known_epoch(sampler, None, 5, batched=batched) is None
    assert len(list(ResumableSampler(sampler, 1, batched=batched))) == len(sampler)


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


def keyed(samples: int, key: int) -> Tensor:
    return KeyedOrder(samples, key).at(range(samples))


def permuted(samples: int, key: int) -> Tensor:
    return Permutation(samples, seeded(key)).at(range(samples))


@pytest.mark.parametrize("samples", [*range(40 if LONG else 9), 97, 1000, 1024, 65537, 10**6])
def test_each_sample_has_one_position(samples: int) -> None:
    assert torch.equal(keyed(samples, key=samples).sort().values, torch.arange(samples))


def test_keys_and_numbers_of_samples_give_different_orders_which_are_the_same_in_every_version() -> None:
    assert torch.equal(keyed(1000, 1), keyed(1000, 1))
    assert (keyed(1000, 1) == keyed(1000, 2)).sum() < 10
    assert (keyed(1000, 1)[:999] == keyed(999, 1)).sum() < 10
    assert keyed(10, 1).tolist() == [7, 0, 9, 4, 1, 8, 5, 6, 3, 2]
    assert KeyedOrder(10**9, 1).at(range(4)).tolist() == [228548711, 56908761, 889733943, 113470416]


@pytest.mark.parametrize("samples", [5, 10**6, 10**9, 2**40, 2**62])
def test_a_batch_has_the_same_samples_wherever_reading_begins(samples: int) -> None:
    order = KeyedOrder(samples, 3)
    batches = [range(start, min(start + 700, samples)) for start in range(max(samples - 2500, 0), samples, 700)]
    read = list(order.read(batches))
    assert all(torch.equal(one, order.at(batch)) for one, batch in zip(read, batches, strict=True))
    assert all(((one >= 0) & (one < samples)).all() for one in read)


# -- statistics: the same bounds hold for torch's permutation ----------------------------------------


def surprise(counts: Tensor) -> float:
    """Return by how many standard deviations the chi-square of counts exceeds that of a uniform distribution."""
    expected, free = counts.sum() / counts.numel(), counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / sqrt(2 * free))


def counted(values: Tensor, kinds: int) -> Tensor:
    return torch.bincount(values, minlength=kinds).double()


ORDERS = pytest.mark.parametrize("order", [keyed, permuted])


@ORDERS
@pytest.mark.parametrize("samples", [16, 50] if LONG else [16])
def test_over_many_epochs_each_sample_is_at_each_position_equally_often(order: Any, samples: int) -> None:
    drawn = torch.stack([order(samples, key) for key in range(1000)])  # shape (epochs, samples)
    pairs = torch.arange(samples) * samples + drawn
    table = counted(pairs.flatten(), samples**2).view(samples, samples)
    free = (samples - 1) ** 2  # rows and columns of the table have fixed sums
    expected = 1000 / samples
    assert abs(float(((table - expected) ** 2 / expected).sum()) - free) < 5 * sqrt(2 * free)
    steps = (drawn[:, 1:] - drawn[:, :-1]) % samples
    assert abs(surprise(counted(steps.flatten(), samples)[1:])) < 5
    fixed = (drawn == torch.arange(samples)).double().sum(1).mean()
    assert abs(fixed - 1) < 5 / sqrt(1000), "the number of fixed points is Poisson with mean 1"


@ORDERS
@pytest.mark.parametrize("samples", [PERMUTED + 1, 2_000_003] if LONG else [PERMUTED + 1])
def test_in_an_epoch_of_many_samples_no_two_positions_are_related(order: Any, samples: int) -> None:
    drawn = order(samples, 3)
    blocks = drawn * 256 // samples
    assert abs(surprise(counted(torch.arange(samples) * 256 // samples * 256 + blocks, 2**16))) < 5, "position and sample"
    for distance in (1, 2, 1024, 1025, 1415):  # 1025 and 1415 samples are about a row of each
        first, second = drawn[:-distance], drawn[distance:]
        assert abs(surprise(counted(blocks[:-distance] * 256 + blocks[distance:], 2**16))) < 5
        assert abs(surprise(counted((second - first) % samples * 4096 // samples, 4096))) < 5
        assert abs(surprise(counted(first % 61 * 61 + second % 61, 61**2))) < 5
    assert (drawn == torch.arange(samples)).sum() < 10
    assert (drawn == order(samples, 4)).sum() < 10


# -- loaders -------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"permuted": 10}


@pytest.mark.parametrize("in_memory", [False, True])
def test_loaders_with_more_samples_than_the_limit_have_a_keyed_order(in_memory: bool) -> None:
    def source(**options: Any) -> ResumableLoader:
        if in_memory:
            return resumable(TensorBatches(torch.arange(22), batch_size=4, shuffle=True), 1, **options)
        return resumable(loader_of(Numbers(), shuffle=True), 1, **options)

    def read(source: ResumableLoader, epoch: int, skip: int = 0) -> list[Any]:
        return plain(batch[0] if in_memory else batch for batch in source.batches(epoch, skip))

    keyed = source(**SMALL)
    ours = read(keyed, 2)
    assert ours != read(source(), 2)
    assert sorted(number for batch in ours for number in batch) == list(range(22))
    assert read(keyed, 2) == ours != read(keyed, 1)
    for skip in range(len(ours)):
        assert read(keyed, 2, skip) == ours[skip:]
    assert [keyed.indices(2, number) for number in range(6)] == ours


def test_a_generator_of_the_sampler_determines_the_key() -> None:
    orders = [
        plain(resumable(loader_of(Numbers(), shuffle=True, generator=seeded(given)), seed, **SMALL).batches(0, 0))
        for given, seed in ((5, 1), (5, 2), (6, 1))
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_ranks_read_a_keyed_order_as_one_process_does(workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return loader_of(Numbers("torch", samples=48), shuffle=True, num_workers=workers)

    whole = plain(resumable(loader(), 1, **SMALL).batches(1, 0))
    shards = [plain(resumable(loader(), 1, shard=Shard(rank, 3), **SMALL).batches(1, 0)) for rank in range(3)]
    assert [batch for round_ in zip(*shards, strict=True) for batch in round_] == whole


# -- runs ----------------------------------------------------------------------------------------------

MANY = PERMUTED + 3


def trained(directory: Path, steps: int, *callbacks: Callback) -> list[Tensor]:
    """Train on batches of a shuffled epoch of a million samples; return the numbers of the samples in each batch."""
    seen: list[Tensor] = []
    see = on(Callback.on_batch_start)(lambda run, batch: seen.append(batch[0].clone()))
    tiny_trainer(
        optimizer=partial(torch.optim.SGD, lr=1e-9),
        loader=TensorBatches(torch.arange(MANY), batch_size=2**18, shuffle=True),
        compute_loss=lambda model, batch: model(batch[0][:2, None].float()).square().mean(),
        steps=steps,
        seed=1,
        directory=directory,
        callbacks=[see, *callbacks, Checkpoint("2 steps")],
    ).fit(resume="auto")
    return seen


def epoch_of(epoch: int, *, keyed: bool) -> list[Tensor]:
    seed = derive_seed(1, epoch)
    order: Order = KeyedOrder(MANY, seed) if keyed else Permutation(MANY, seeded(seed))
    return [order.at(range(start, min(start + 2**18, MANY))) for start in range(0, MANY, 2**18)]


def test_a_run_of_an_older_version_keeps_torchs_order_and_a_new_run_its_keyed_order(tmp_path: Path) -> None:
    as_in_older_versions = on(Callback.on_save)(lambda run, checkpoint: checkpoint.state.pop("permuted"))
    in_torchs_order = on(Callback.on_setup)(lambda run: setattr(session_of(run).cursor, "permuted", maxsize))
    expected = {kind: [one for epoch in (0, 1) for one in epoch_of(epoch, keyed=kind)] for kind in (True, False)}
    first = trained(tmp_path / "new", 2)
    assert all(map(torch.equal, first + trained(tmp_path / "new", 8), expected[True]))
    first = trained(tmp_path / "old", 2, in_torchs_order, as_in_older_versions)
    second = trained(tmp_path / "old", 4)  # its checkpoint says which order the run has
    assert all(map(torch.equal, first + second + trained(tmp_path / "old", 8), expected[False]))
