"""Random numbers in the data depend on (seed, epoch, batch) alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from cadenza.loading import resumable
from cadenza.loading.rng import RNGState, derive_seed, isolated_rng, seed_host
from cadenza.status.plain import first_difference
from tests.loading.data import AtOnce, Buckets, Numbers, epochs_of, loader_of, noise_of, noisy_collate, plain, rest_of

ALL = ("torch", "numpy", "python")


def draws() -> tuple[float, float, float]:
    return noise_of("torch"), noise_of("numpy"), noise_of("python")


# -- seeds --------------------------------------------------------------------------------------------


def test_seeds_of_neighbouring_batches_are_all_different() -> None:
    seeds = {derive_seed(seed, epoch, batch) for seed in range(20) for epoch in range(20) for batch in range(20)}
    assert len(seeds) == 20**3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_of_an_epoch_differs_from_the_seed_of_its_first_batch() -> None:
    assert derive_seed(1, 0) != derive_seed(1, 0, 0)


def test_negative_and_large_seeds_are_accepted() -> None:
    assert derive_seed(-1, 0) != derive_seed(1, 0)
    assert derive_seed(2**70 + 1) == derive_seed(1), "only 64 bits are used"


def test_seed_host_seeds_all_three_generators() -> None:
    seed_host(5)
    first = draws()
    seed_host(5)
    assert draws() == first
    seed_host(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_isolated_rng_restores_the_generators_after_an_error_too() -> None:
    before = RNGState.capture().to_plain()
    with pytest.raises(ZeroDivisionError), isolated_rng(3):
        assert draws()[0] / 0
    assert first_difference(before, RNGState.capture().to_plain()) is None


# -- batches ------------------------------------------------------------------------------------------


class Drawing(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1)


def test_tensors_that_torch_indexes_and_stacks_are_loaded_without_seeding_and_all_others_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("cadenza.loading.seeded.seed_host", seeds.append)
    tensors = TensorDataset(torch.arange(8), torch.rand(8))

    def seeded(dataset: Any, **options: Any) -> bool:
        seeds.clear()
        loader = DataLoader(dataset, 3, shuffle=True, **options)
        before = RNGState.capture().to_plain()
        loaded = [one.tolist() for batch in resumable(loader, seed=1).batches(0, 1) for one in batch]
        assert first_difference(before, RNGState.capture().to_plain()) is None
        again = DataLoader(dataset, 3, shuffle=True, collate_fn=lambda samples: default_collate(samples))
        same = [one.tolist() for batch in resumable(again, seed=1).batches(0, 1) for one in batch]
        assert loaded == same or isinstance(dataset, Drawing)
        return len(seeds) > 2  # two batches with the second loader

    assert not seeded(tensors)
    assert not seeded(Subset(ConcatDataset([tensors, tensors]), range(8)))
    assert seeded(Drawing(torch.arange(8)))
    assert seeded(Subset(ConcatDataset([tensors, Drawing(torch.arange(8))]), range(8)))
    assert seeded(tensors, collate_fn=lambda samples: default_collate(samples))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are fewer cores than workers
@pytest.mark.parametrize("noise", [(), ("torch",), ("numpy",), ("python",), ALL])
def test_batches_are_the_same_under_any_number_of_workers(noise: tuple[str, ...]) -> None:
    none, one, three = (epochs_of(loader_of(Numbers(*noise), shuffle=True, num_workers=n), epochs=2) for n in (0, 1, 3))
    assert none == one == three


def test_batches_do_not_depend_on_prefetching_or_persistent_workers() -> None:
    plain_workers = epochs_of(loader_of(Numbers(*ALL), shuffle=True, num_workers=2))
    persistent = loader_of(Numbers(*ALL), shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=5)
    assert epochs_of(persistent) == plain_workers


def test_batches_differ_between_epochs_and_between_seeds() -> None:
    first, second, third = epochs_of(loader_of(Numbers("torch")))
    assert first != second != third != first
    assert epochs_of(loader_of(Numbers("torch")), seed=2)[0] != first


def test_equal_samples_in_one_batch_get_different_noise() -> None:
    (batch,) = rest_of(DataLoader(Numbers("torch"), batch_sampler=[[0, 0, 0]]), 0, 0)
    assert len(set(batch)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_may_draw(workers: int) -> None:
    loader = loader_of(Numbers("torch"), collate_fn=noisy_collate, num_workers=workers)
    whole = epochs_of(loader, epochs=2)
    assert whole == epochs_of(loader_of(Numbers("torch"), collate_fn=noisy_collate), epochs=2)
    assert rest_of(loader, 1, 2) == whole[1][2:]


def test_getitems_of_a_dataset_is_used() -> None:
    at_once = epochs_of(loader_of(AtOnce("torch")), epochs=1)[0]
    assert [int(number) for number in at_once[0]] == [3, 2, 1, 0]
    assert rest_of(loader_of(AtOnce("torch"), num_workers=2), 0, 0) == at_once


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"collate_fn": noisy_collate},
        {"num_workers": 2},
        {"batch_sampler": Buckets()},
    ],
)
def test_reading_does_not_change_the_rng_state(options: dict[str, Any]) -> None:
    batches = resumable(loader_of(Numbers(*ALL), **options), 1).batches(0, 0)
    before = RNGState.capture().to_plain()
    for _ in range(4):
        next(batches)
    assert first_difference(before, RNGState.capture().to_plain()) is None


def test_an_error_of_the_dataset_does_not_change_the_rng_state() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            draws()
            raise LookupError("no such file")

    batches = resumable(loader_of(Broken()), 1).batches(0, 0)
    before = RNGState.capture().to_plain()
    with pytest.raises(LookupError, match="no such file"):
        next(batches)
    assert first_difference(before, RNGState.capture().to_plain()) is None


def test_the_model_draws_the_same_numbers_as_without_a_loader() -> None:
    seed_host(9)
    alone = [draws() for _ in range(3)]
    seed_host(9)
    batches = resumable(loader_of(Numbers(*ALL), shuffle=True), 1).batches(0, 0)
    beside = []
    for _ in range(3):
        next(batches)
        beside.append(draws())
    assert beside == alone


# -- user code in workers -----------------------------------------------------------------------------


def _name_the_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.samples_of = worker  # type: ignore[attr-defined]  # as users do to open a file in each worker


class Named(Numbers):
    """Yields the number of the worker."""

    samples_of = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.samples_of)


def test_a_worker_init_fn_gets_the_users_dataset() -> None:
    loader = loader_of(Named(), num_workers=2, worker_init_fn=_name_the_worker)
    assert [set(batch) for batch in epochs_of(loader, epochs=1)[0]] == [{0}, {1}, {0}, {1}, {0}, {1}]


def _reseed(worker: int) -> None:
    random.seed(worker)
    numpy.random.seed(worker)


def test_a_worker_init_fn_that_seeds_does_not_change_the_batches() -> None:
    seeding = epochs_of(loader_of(Numbers(*ALL), num_workers=2, worker_init_fn=_reseed), epochs=1)
    assert seeding == epochs_of(loader_of(Numbers(*ALL)), epochs=1)


class OwnGenerator(Numbers):
    """Draws from its own generator, which Cadenza cannot seed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.generator.random())


class SeededOwnGenerator(Numbers):
    """Creates a generator for each sample from a number that it draws, as the documentation recommends."""

    def __getitem__(self, index: int) -> torch.Tensor:
        own = numpy.random.default_rng(int(torch.randint(2**62, ())))
        return torch.tensor(own.random())


@pytest.mark.parametrize(("make", "exact"), [(OwnGenerator, False), (SeededOwnGenerator, True)])
def test_the_users_own_generator_is_reproducible_if_it_is_created_from_a_drawn_number(
    make: Callable[[], Numbers], exact: bool
) -> None:
    whole = epochs_of(loader_of(make()), epochs=1)[0]
    assert (rest_of(loader_of(make()), 0, 2) == whole[2:]) is exact


def test_batches_of_a_list_are_not_copied() -> None:
    batches = [torch.tensor([1.0]), torch.tensor([2.0])]
    assert next(resumable(batches, 1).batches(0, 1)) is batches[1]
    assert plain(resumable(tuple(batches), 1).batches(4, 2)) == []
