"""All generators are seeded together, and their state is restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, on
from cadenza.callbacks import Capsule, Checkpoint
from cadenza.loading import TensorBatches, resumable
from cadenza.loading.host_streams import NumpyStream, PythonStream
from cadenza.loading.rng import QuickState, RNGState, isolated_rng, preserve_rng_state, quick_capture, seed_all
from cadenza.status.plain import first_difference
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_seed_all_seeds_all_generators() -> None:
    seed_all(2**40 + 3)
    first = draw()
    seed_all(2**40 + 3)
    assert draw() == first


def test_the_rng_state_is_preserved_also_after_an_error() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)

    def fail() -> None:
        with preserve_rng_state():
            draw()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert draw() == expected


def test_a_run_with_a_seed_starts_from_it_and_a_run_without_does_not_seed() -> None:
    drawn: list[float] = []
    look = on(Callback.on_fit_start)(lambda run: drawn.append(torch.rand(()).item()))
    for seed in (5, 5, None, None):
        tiny_run(seed=seed, steps=1, callbacks=[look])
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


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


def test_without_a_seed_torchs_global_generator_determines_the_order_of_the_data() -> None:
    torch.manual_seed(0)
    first, second = orders(fits=2)
    assert first != second
    torch.manual_seed(0)
    assert orders() == [first]
    torch.manual_seed(1)
    assert orders() != [first]


# -- numpy's RNG state, which is put aside for every batch --------------------------------------------


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
    state = numpy.random.RandomState(8).get_state()
    numpy.random.set_state(state)
    with isolated_rng(5):
        numpy.random.rand()
    assert numpy.random.rand() == numpy.random.RandomState(8).rand()


def test_the_numpy_state_survives_a_checkpoint() -> None:
    for drawn in range(3):
        numpy.random.seed(4)
        numpy.random.randn(drawn)
        plain = RNGState.capture().to_plain()
        assert first_difference(plain, RNGState.from_plain(plain).to_plain()) is None
        expected = numpy.random.randn(3)
        RNGState.from_plain(plain).restore()
        assert numpy.array_equal(numpy.random.randn(3), expected)


# -- Python's, by its memory ---------------------------------------------------------------------------


def test_the_memory_of_pythons_generator_holds_its_state() -> None:
    stream = PythonStream()
    for drawn in range(3):
        random.seed(4)
        [random.gauss(0, 1) for _ in range(drawn)]  # they are drawn in pairs as well
        expected, captured = random.getstate(), stream.capture()
        assert isinstance(captured[0], bytes)
        stream.seed(2**62 + 7)
        seeded = random.getstate()
        random.seed(2**62 + 7)
        assert random.getstate() == seeded
        stream.restore(captured)
        assert random.getstate() == expected


def test_a_state_that_is_captured_quickly_is_that_of_the_generators_whatever_was_drawn() -> None:
    draw, capture = random.Random(5), quick_capture(cuda=False)
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
    for _ in range(600):
        draw.choice(acts)()
        expected, captured = RNGState.capture().to_plain(), QuickState(*capture())
        random.random(), numpy.random.randn(), torch.rand(1)
        assert first_difference(captured.to_plain(), expected) is None


def test_the_state_of_generators_that_did_not_draw_is_not_read_again() -> None:
    seed_all(3)  # no half of a pair waits
    capture = quick_capture(cuda=False)
    first, _ = capture()
    assert capture()[0] is first
    torch.rand(1)
    second, _ = capture()
    assert [one is other for one, other in zip(first, second, strict=True)] == [True, True, False]
    random.random()
    third, _ = capture()
    assert [one is other for one, other in zip(second, third, strict=True)] == [False, True, True]


def test_another_generator_of_numpy_is_noticed() -> None:
    of_numpy: Any = numpy.random
    capture, own, set_generator = quick_capture(cuda=False), of_numpy.get_bit_generator(), of_numpy.set_bit_generator
    try:
        for bits in (numpy.random.MT19937(3), own):
            set_generator(bits)
            captured = QuickState(*capture())
            drawn = numpy.random.rand()
            captured.restore()
            assert numpy.random.rand() == drawn
    finally:
        set_generator(own)


@pytest.mark.parametrize("kind", [numpy.random.PCG64, numpy.random.Philox, numpy.random.SFC64])
def test_a_generator_of_numpy_that_is_no_twister_is_kept_by_batches_and_checkpoints(kind: Any, tmp_path: Path) -> None:
    of_numpy: Any = numpy.random
    own = of_numpy.get_bit_generator()

    def drawn(fits: int, directory: Path) -> list[float]:
        seen: list[float] = []
        of_numpy.set_bit_generator(kind(1))
        for parts in range(fits, 0, -1):
            draws = on(Callback.on_batch_start)(lambda run, batch: seen.append(numpy.random.randn()))
            tiny_trainer(
                loader=DataLoader(DrawsSometimes(), 4),
                seed=1,
                compute_loss=lambda model, batch: model.weight.sum(),
                directory=directory,
                steps=6 // parts,
                callbacks=[draws, Capsule(), Checkpoint("3 steps")],
            ).fit(resume="auto")
        return seen

    try:
        whole = drawn(1, tmp_path / "whole")
        assert len(set(whole)) == 6
        assert drawn(2, tmp_path / "continued") == whole
    finally:
        of_numpy.set_bit_generator(own)


def test_a_generator_of_another_class_is_read_as_python_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_inst", random.SystemRandom())
    stream = PythonStream()
    random.seed(4)
    expected, captured = random.getstate(), stream.capture()
    stream.seed(5)
    assert random.getstate() == random.Random(5).getstate()
    stream.restore(captured)
    assert random.getstate() == captured == expected


class DrawsSometimes(Dataset[torch.Tensor]):
    """A data set of which every third sample draws, from one generator after the other."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = (random.random, random.gauss, numpy.random.rand, numpy.random.randn, lambda: torch.rand(()).item())
        return torch.tensor(float(index) if index % 3 else draws[index // 3 % 5]())


@pytest.mark.parametrize("make", [lambda: DataLoader(DrawsSometimes(), 2, shuffle=True), lambda: Each(DrawsSometimes())])
def test_what_draws_only_sometimes_gives_the_same_batches_from_any_position(make: Callable[[], Any]) -> None:
    seed_all(1)
    whole = [torch.as_tensor(one).tolist() for one in resumable(make(), 3, replay=True).batches(0, 0)]
    after = draw()
    for skip in range(1, len(whole), 5):
        seed_all(1)
        rest = []
        for one in resumable(make(), 3, replay=True).batches(0, skip):
            rest.append(torch.as_tensor(one).tolist())
            draw(), random.gauss(0, 1), numpy.random.randn()  # as a step of the training
        assert rest == whole[skip:]
    seed_all(1)
    assert draw() == after, "the loader draws from the generators of the training"


class Each:
    """The samples of a data set, one after another, without positions."""

    def __init__(self, dataset: DrawsSometimes) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.dataset[index] for index in range(len(self.dataset)))


def test_another_kind_of_generator_is_read_as_numpy_offers() -> None:
    class Elsewhere:
        """A numpy that does not say where its numbers lie, as before 1.24."""

        random = numpy.random.mtrand._rand
        frombuffer = numpy.frombuffer

    stream = NumpyStream()
    state = stream.capture(Elsewhere)
    assert isinstance(state, tuple)
    expected = numpy.random.rand()
    stream.restore(Elsewhere, state)
    assert numpy.random.rand() == expected
    numpy.random.seed(6)
    copied = stream.capture(numpy)
    assert isinstance(copied, bytes)
    expected = numpy.random.rand()
    stream.restore(Elsewhere, copied)
    assert numpy.random.rand() == expected
