"""Random numbers: all generators are seeded and restored together; in the data they depend on (seed, epoch, batch) alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from cadenza import Callback, on
from cadenza.callbacks import Capsule, Checkpoint
from cadenza.loading import TensorBatches, resumable, rng
from cadenza.loading.rng import RNGState, derive_seed, isolated_rng, numpy_capture, numpy_restore, seed_all, seed_host
from cadenza.status.encoding import first_difference
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from tests.engine.parts import Stream, Unsized
from tests.loading.data import AtOnce, Buckets, Numbers, epochs_of, loader_of, noise_of, noisy_collate, plain, rest_of

ALL = ("torch", "numpy", "python")


def draws() -> tuple[float, float, float]:
    return noise_of("torch"), noise_of("numpy"), noise_of("python")


def state() -> dict[str, Any]:
    return RNGState.capture().to_plain()


def public_state() -> dict[str, Any]:
    """The state as the public functions return it."""
    return RNGState(random.getstate(), torch.get_rng_state(), {}, numpy.random.get_state()).to_plain()


def unchanged(before: dict[str, Any]) -> bool:
    return first_difference(before, state()) is None


# -- seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [seed_all, seed_host])
def test_all_generators_are_seeded_together(seed: Callable[[int], None]) -> None:
    seed(2**40 + 3)
    first = draws()
    seed(2**40 + 3)
    assert draws() == first
    seed(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


@pytest.mark.parametrize("context", [rng.preserve_rng_state, lambda: isolated_rng(3)], ids=["preserved", "isolated"])
def test_the_generators_are_restored_after_an_error_too(context: Callable[[], Any]) -> None:
    for drawn in range(3):
        seed_all(4)
        [random.gauss(0, 1) for _ in range(drawn)]  # they are drawn in pairs
        before = state()
        with pytest.raises(ZeroDivisionError), context():
            assert draws()[0] / 0
        assert unchanged(before)


def test_derived_seeds_are_all_different_and_any_seed_is_accepted() -> None:
    seeds = {derive_seed(seed, epoch, batch) for seed in range(20) for epoch in range(20) for batch in range(20)}
    assert len(seeds) == 20**3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 0) != derive_seed(1, 0, 0), "that of an epoch is not that of its first batch"
    assert derive_seed(-1, 0) != derive_seed(1, 0)
    assert derive_seed(2**70 + 1) == derive_seed(1), "only 64 bits are used"


def test_a_run_with_a_seed_starts_from_it_and_without_one_torchs_global_generator_determines_the_order_of_the_data() -> None:
    drawn: list[float] = []
    look = on(Callback.on_fit_start)(lambda run: drawn.append(torch.rand(()).item()))
    for seed in (5, 5, None, None):
        tiny_run(seed=seed, steps=1, callbacks=[look])
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    torch.manual_seed(0)
    first, second = orders(fits=2)
    assert first != second
    torch.manual_seed(0)
    assert orders() == [first]
    torch.manual_seed(1)
    assert orders() != [first]


def orders(fits: int = 1) -> list[list[float]]:
    """Return the order of the data in each of `fits` runs without a seed."""
    read: list[list[float]] = []
    trainer = tiny_trainer(
        loader=TensorBatches(torch.arange(30.0).unsqueeze(1), torch.zeros(30, 1), batch_size=1, shuffle=True),
        callbacks=[
            on(Callback.on_fit_start)(lambda run: read.append([])),
            on(Callback.on_batch_start)(lambda run, batch: read[-1].append(batch[0].item())),
        ],
    )
    for _ in range(fits):
        trainer.evaluate(tiny_loader())  # an evaluation outside a run must not change the order of the next run
        trainer.fit()
    return read


# -- the states of the generators, which are put aside for every batch --------------------------------


def test_half_a_pair_of_normal_numbers_outside_is_kept_and_one_inside_is_dropped() -> None:
    for outside in range(4):
        for inside in range(4):
            numpy.random.seed(3)
            alone = numpy.random.randn(outside + 4)
            numpy.random.seed(3)
            drawn = [*numpy.random.randn(outside)]
            for _ in range(3):  # again from a state that is known already
                with isolated_rng(5):
                    numpy.random.randn(inside)
            assert [*drawn, *numpy.random.randn(4)] == [*alone], (outside, inside)


def test_a_state_that_the_user_sets_in_between_is_used() -> None:
    numpy.random.seed(3)
    with isolated_rng(5):
        numpy.random.rand()
    numpy.random.set_state(numpy.random.RandomState(8).get_state())
    with isolated_rng(5):
        numpy.random.rand()
    assert numpy.random.rand() == numpy.random.RandomState(8).rand()


def test_the_states_survive_a_checkpoint() -> None:
    for drawn in range(3):
        numpy.random.seed(4)
        numpy.random.randn(drawn)
        before = state()
        assert first_difference(before, RNGState.from_plain(before).to_plain()) is None
        expected = numpy.random.randn(3)
        RNGState.from_plain(before).restore()
        assert numpy.array_equal(numpy.random.randn(3), expected)


def test_a_captured_state_is_that_of_the_generators_whatever_was_drawn() -> None:
    draw = random.Random(5)
    acts: list[Callable[[], object]] = [
        lambda: None,
        lambda: [random.random() for _ in range(312)],  # all numbers of the generator: the index comes again
        lambda: random.gauss(0, 1),
        lambda: numpy.random.rand(312),
        lambda: numpy.random.randn(),
        lambda: torch.rand(draw.choice((3, 624))),
        lambda: torch.randn(1),  # the other half of a pair waits
        lambda: torch.normal(0.0, torch.ones(1)),
        lambda: torch.manual_seed(draw.randrange(3)),
        lambda: torch.set_rng_state(state_of_torch),
        lambda: seed_all(draw.randrange(3)),
        lambda: random.seed(draw.randrange(3)),
        lambda: numpy.random.seed(draw.randrange(3)),
        lambda: numpy.random.set_state(state_of_numpy),
        lambda: (numpy.random.set_state(state_of_numpy), numpy.random.randn()),  # the same numbers, and no half waits
    ]
    torch.randn(1)
    numpy.random.randn()
    state_of_torch, state_of_numpy = torch.get_rng_state(), numpy.random.get_state()
    for _ in range(400):
        draw.choice(acts)()
        expected, captured = public_state(), RNGState.capture()
        random.random(), numpy.random.randn(), torch.rand(1)
        assert first_difference(captured.to_plain(), expected) is None


@pytest.fixture
def set_generator() -> Iterator[Callable[[Any], None]]:
    """Return the function that replaces the global generator of numpy, until the test ends."""
    of_numpy: Any = numpy.random
    before = of_numpy.get_bit_generator()
    yield of_numpy.set_bit_generator
    of_numpy.set_bit_generator(before)


def test_another_generator_of_numpy_is_noticed(set_generator: Callable[[Any], None]) -> None:
    of_numpy = numpy.random.mtrand
    for bits in (numpy.random.MT19937(3), of_numpy._rand._bit_generator):
        set_generator(bits)
        captured = RNGState.capture()
        drawn = numpy.random.rand()
        captured.restore()
        assert numpy.random.rand() == drawn


@pytest.mark.parametrize("kind", [numpy.random.PCG64, numpy.random.Philox, numpy.random.SFC64])
def test_a_generator_of_numpy_that_is_no_twister_is_kept_by_batches_and_checkpoints(
    kind: Any, tmp_path: Path, set_generator: Callable[[Any], None]
) -> None:
    def drawn(fits: int, directory: Path) -> list[float]:
        seen: list[float] = []
        set_generator(kind(1))
        for parts in range(fits, 0, -1):
            look = on(Callback.on_batch_start)(lambda run, batch: seen.append(numpy.random.randn()))
            tiny_trainer(
                loader=DataLoader(DrawsSometimes(), 4),
                seed=1,
                compute_loss=lambda model, batch: model.weight.sum(),
                directory=directory,
                steps=6 // parts,
                callbacks=[look, Capsule(), Checkpoint("3 steps")],
            ).fit(resume="auto")
        return seen

    whole = drawn(1, tmp_path / "whole")
    assert len(set(whole)) == 6
    assert drawn(2, tmp_path / "continued") == whole


def test_a_generator_of_another_package_with_the_name_of_the_twister_is_read_with_public_functions(
    set_generator: Callable[[Any], None],
) -> None:
    set_generator(type("MT19937", (numpy.random.PCG64,), {})(1))
    captured = RNGState.capture()
    assert isinstance(captured.numpy, dict)
    drawn = numpy.random.rand()
    captured.restore()
    assert numpy.random.rand() == drawn


def test_a_numpy_without_an_address_is_read_with_its_public_functions() -> None:
    class Elsewhere:
        """A numpy that does not say where its numbers lie, as before 1.24."""

        random = numpy.random.mtrand._rand

    for source, kind in ((Elsewhere, dict), (numpy, bytes)):
        kept = numpy_capture(source)
        assert isinstance(kept, kind)
        drawn = numpy.random.rand()
        numpy_restore(Elsewhere, kept)
        assert numpy.random.rand() == drawn


class TwoDevices:
    """The module of an accelerator with two devices, as ``torch.cuda`` is one; each has a generator on the host."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [one.get_state() for one in self.generators]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.generators[device].set_state(state)

    def draw(self, device: int) -> float:
        return torch.rand((), generator=self.generators[device]).item()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    module = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_the_generators_of_accelerators_are_kept_for_their_role_and_not_for_their_index(two_devices: TwoDevices) -> None:
    plain = RNGState.capture().to_plain(1)
    drawn = [two_devices.draw(0), two_devices.draw(1)]
    RNGState.from_plain(plain, 0).restore()  # the run had the second device, and continues on the first one
    assert [two_devices.draw(1), two_devices.draw(0)] == drawn
    RNGState.from_plain(plain, 1).restore()
    assert [two_devices.draw(0), two_devices.draw(1)] == drawn
    two_devices.generators.pop()
    RNGState.from_plain(plain, 0).restore()  # on a machine with one
    assert two_devices.draw(0) == drawn[1]


def test_all_accelerators_are_restored_beside_the_host(two_devices: TwoDevices) -> None:
    captured = RNGState.capture()
    drawn = [two_devices.draw(0), two_devices.draw(1)]
    captured.restore()
    assert [two_devices.draw(0), two_devices.draw(1)] == drawn


# -- batches ------------------------------------------------------------------------------------------


class DrawsSometimes(Dataset[torch.Tensor]):
    """A data set of which every third sample draws, from one generator after the other."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = (random.random, random.gauss, numpy.random.rand, numpy.random.randn, lambda: torch.rand(()).item())
        return torch.tensor(float(index) if index % 3 else draws[index // 3 % 5]())


@pytest.mark.parametrize("make", [lambda data: DataLoader(data, 2, shuffle=True), lambda data: Unsized(Stream(data))])
def test_what_draws_only_sometimes_gives_the_same_batches_from_any_position(make: Callable[[Any], Any]) -> None:
    seed_all(1)
    whole = [torch.as_tensor(one).tolist() for one in resumable(make(DrawsSometimes()), 3, replay=True).batches(0, 0)]
    after = draws()
    for skip in range(1, len(whole), 5):
        seed_all(1)
        rest = []
        for one in resumable(make(DrawsSometimes()), 3, replay=True).batches(0, skip):
            rest.append(torch.as_tensor(one).tolist())
            draws(), random.gauss(0, 1), numpy.random.randn()  # as a step of the training
        assert rest == whole[skip:]
    seed_all(1)
    assert draws() == after, "the loader draws from the generators of the training"


class Drawing(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1)


def test_tensors_that_torch_indexes_and_stacks_are_loaded_without_seeding_and_all_others_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    exchange = RNGState.exchange

    def note(seed: int) -> RNGState:
        seeds.append(seed)
        return exchange(seed)

    monkeypatch.setattr(RNGState, "exchange", note)
    tensors = TensorDataset(torch.arange(8), torch.rand(8))

    def seeded(dataset: Any, **options: Any) -> bool:
        seeds.clear()
        loader = DataLoader(dataset, 3, shuffle=True, **options)
        before = state()
        loaded = [one.tolist() for batch in resumable(loader, seed=1).batches(0, 1) for one in batch]
        assert unchanged(before)
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
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 5},
        {"num_workers": 2, "worker_init_fn": lambda worker: (random.seed(worker), numpy.random.seed(worker))},
    ],
    ids=["one worker", "three workers", "persistent workers", "a worker_init_fn that seeds"],
)
def test_batches_do_not_depend_on_workers(options: dict[str, Any]) -> None:
    whole = epochs_of(loader_of(Numbers(*ALL), shuffle=True, collate_fn=noisy_collate), epochs=2)
    loader = loader_of(Numbers(*ALL), shuffle=True, collate_fn=noisy_collate, **options)
    assert epochs_of(loader, epochs=2) == whole
    assert rest_of(loader, 1, 2) == whole[1][2:]


@pytest.mark.parametrize("noise", ALL)
def test_batches_differ_between_epochs_between_seeds_and_their_samples_from_each_other(noise: str) -> None:
    first, second, third = epochs_of(loader_of(Numbers(noise)))
    assert first != second != third != first
    assert epochs_of(loader_of(Numbers(noise)), seed=2)[0] != first
    (batch,) = rest_of(DataLoader(Numbers(noise), batch_sampler=[[0, 0, 0]]), 0, 0)
    assert len(set(batch)) == 3


def test_getitems_of_a_dataset_is_used_and_batches_of_a_list_are_not_copied() -> None:
    at_once = epochs_of(loader_of(AtOnce("torch")), epochs=1)[0]
    assert [int(number) for number in at_once[0]] == [3, 2, 1, 0]
    assert rest_of(loader_of(AtOnce("torch"), num_workers=2), 0, 0) == at_once
    batches = [torch.tensor([1.0]), torch.tensor([2.0])]
    assert next(resumable(batches, 1).batches(0, 1)) is batches[1]
    assert plain(resumable(tuple(batches), 1).batches(4, 2)) == []


class Broken(Numbers):
    """Sample 16 draws, and cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        draws()
        if index == 16:
            raise LookupError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"collate_fn": noisy_collate}, {"num_workers": 2}, {"batch_sampler": Buckets()}]
)
def test_reading_does_not_change_the_rng_state(options: dict[str, Any]) -> None:
    batches = resumable(loader_of(Numbers(*ALL), **options), 1).batches(0, 0)
    broken = resumable(loader_of(Broken()), 1).batches(0, 4)
    before = state()
    for _ in range(4):
        next(batches)
    with pytest.raises(LookupError, match="no such file"):
        next(broken)
    assert unchanged(before)


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
