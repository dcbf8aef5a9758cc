"""An epoch that multiple ranks read in succession, and a stream of shards: every sample once, with the noise of its index."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.drivers import DdpDriver, SingleDriver
from cadenza.errors import DataError
from cadenza.loading import Consumed, ResumableLoader, Shard, num_batches, resumable
from cadenza.loading.loaders import Limited
from cadenza.loading.shards import PositionBatches, RankBatches, Replicated, batches_of_rank
from cadenza.testing import launch, tiny_trainer
from tests.loading import data
from tests.loading.data import Keeping, Numbers, Shuffled, Stream, epochs_of, loader_of, plain, rounds_by, seeded
from tests.long import seeds

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # from torchdata

Batches = list[list[int]]


def batches_of(sizes: Iterable[int]) -> Batches:
    """Return batches of the numbers 0, 1, 2, ... with the given sizes."""
    return [list(range(start, end)) for start, end in pairwise((0, *accumulate(sizes)))]


def rounds_of(batches: Batches, world_size: int, consumed: Consumed = ()) -> list[list[list[int]]]:
    """Return the rounds of a world size after `consumed`."""
    return list(Shard(0, world_size, consumed=consumed).rounds(iter(batches)))


def read_by(batches: Batches, chain: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Return all rounds of an epoch that is read by the world sizes of `chain` in succession, by the last one to the end."""
    done: list[list[list[int]]] = []
    consumed: Consumed = ()
    for number, (world_size, limit) in enumerate(chain):
        rounds = rounds_of(batches, world_size, consumed)
        rounds = rounds if number == len(chain) - 1 else rounds[:limit]
        done += rounds
        consumed = (*consumed, (world_size, len(rounds)))
        if not rounds:
            consumed = consumed[:-1]
    return done


@pytest.mark.parametrize("seed", seeds(usual=20, long=300))
def test_for_all_sizes_and_chains_every_sample_is_used_once_and_an_interruption_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 5)
    batches = batches_of([size] * draw.randint(0, 30) + [draw.randint(1, size)])  # all equal except the last
    chain = [(draw.randint(1, 6), draw.randint(0, 6)) for _ in range(draw.randint(1, 5))]
    seen: Counter[int] = Counter()
    for round_ in read_by(batches, chain):
        assert all(round_), "a rank has no sample"
        for batch in round_[:1] if isinstance(round_, Replicated) else round_:
            seen.update(batch)
    assert seen == Counter(index for batch in batches for index in batch)
    world_size = chain[0][0]
    whole = rounds_of(batches, world_size)
    for done in range(1, len(whole) + 1):
        assert rounds_of(batches, world_size, ((world_size, done),)) == whole[done:]


def test_batches_that_divide_evenly_stay_whole_and_the_last_rounds_are_split_over_the_current_ranks_or_replicated() -> None:
    batches = batches_of([3] * 24)
    rounds = read_by(batches, [(4, 2), (2, 3), (1, 4), (3, 0)])
    assert [batch for round_ in rounds for batch in round_] == batches
    assert [len(round_) for round_ in rounds] == [4] * 2 + [2] * 3 + [1] * 4 + [3] * 2
    batches = batches_of([3, 3, 3, 3, 3, 2])
    one, two = rounds_of(batches, 4)
    assert [len(batch) for batch in (*one, *two)] == [2, 2, 2, 2, 2, 2, 2, 3]
    left = rounds_of(batches, 1, ((4, 1),))
    assert [batch for (batch,) in left] == two, "rounds that were split stay split once they have begun"
    assert rounds_of(batches, 2, ((4, 1),)) == [two[:2], two[2:]]
    (round_,) = rounds_of(batches_of([4, 4, 2]), 3, ((1, 2),))
    assert round_ == [[8, 9]] * 3
    assert isinstance(round_, Replicated)
    assert rounds_of(batches_of([4, 4, 2]), 2, ((1, 2),)) == [[[8], [9]]]


# -- loaders -------------------------------------------------------------------------------------------


def read(make: Callable[[], Iterable[Any]], chain: list[tuple[int, int]], epoch: int, *, replay: bool = False) -> list[Any]:
    """Return the batches of an epoch that is read by the world sizes of `chain` in succession."""
    rounds, _ = rounds_by(make, chain, epoch, replay=replay)
    return plain(batch for round_ in rounds for batch, _, _ in round_)


CHAIN = [(4, 2), (2, 1), (1, 3), (3, 0)]
MAP_STYLE: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: loader_of(Numbers(samples=97), shuffle=True, generator=seeded(3)),
    "with workers": lambda: loader_of(Numbers(samples=97), shuffle=True, num_workers=2),
    "with small batches": lambda: loader_of(Numbers(samples=29), batch_size=2, shuffle=True),
    "one by one": lambda: loader_of(Numbers(samples=19), batch_size=1, shuffle=True),
}


@pytest.mark.parametrize("name", MAP_STYLE)
@pytest.mark.parametrize("epoch", [0, 2])
def test_every_sample_of_a_map_style_loader_is_used_once(name: str, epoch: int) -> None:
    batches = read(MAP_STYLE[name], CHAIN, epoch)
    samples = MAP_STYLE[name]().dataset.samples  # type: ignore[attr-defined]
    assert sorted(number for batch in batches for number in batch) == list(range(samples))


EVEN: dict[str, Callable[[], Iterable[Any]]] = {
    "map-style": lambda: loader_of(Numbers("torch", "numpy", samples=96), shuffle=True, collate_fn=data.noisy_collate),
    "no batches": lambda: DataLoader(Numbers("torch", samples=24), batch_size=None, shuffle=True),
    "a list": lambda: [[index, index + 1] for index in range(24)],
    "limited": lambda: Limited(loader_of(Numbers("torch", samples=400), shuffle=True), 8),
}


@pytest.mark.parametrize("name", EVEN)
def test_noise_and_order_are_those_of_one_process(name: str) -> None:
    whole = epochs_of(EVEN[name](), epochs=2)[1]
    done = read(EVEN[name], [(4, 2), (2, 1), (1, 2), (3, 0)], 1)
    if name == "limited":  # the limit is a number of rounds, of one batch on each rank
        assert len(done) == 4 * 2 + 2 * 1 + 1 * 2 + 3 * 3
        whole = epochs_of(loader_of(Numbers("torch", samples=400), shuffle=True), epochs=2)[1][: len(done)]
    assert done == whole


STATEFUL: dict[str, Callable[[], Iterable[Any]]] = {
    "a stream in a loader": lambda: loader_of(Keeping(), batch_size=1),
    "a loader": lambda: StatefulDataLoader(Numbers(samples=22), batch_size=1),
    "a loader with workers": lambda: StatefulDataLoader(Numbers(samples=22), batch_size=1, num_workers=2),
    "with replay": lambda: loader_of(Stream(), batch_size=1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_loader_with_a_state_dict_or_with_replay_resumes_after_the_last_round(name: str) -> None:
    whole = epochs_of(STATEFUL[name](), epochs=3)
    epoch = 2 if name == "with replay" else 0
    assert read(STATEFUL[name], CHAIN, epoch, replay=name == "with replay") == whole[epoch][: 13 + 9]


class Uneven(Shuffled):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        return (list(islice(order, 1 + number % 3)) for number in range(11))


def test_a_batch_sampler_without_a_batch_size_is_sharded() -> None:
    def make() -> DataLoader[Any]:
        return loader_of(Numbers(), batch_sampler=Uneven("torch"))

    batches = read(make, [(3, 1), (2, 2), (1, 0)], 1)
    whole = epochs_of(make(), epochs=2)[1]
    assert sorted(number for batch in batches for number in batch) == sorted(number for batch in whole for number in batch)


def test_the_next_epoch_starts_with_the_current_world_size() -> None:
    make = MAP_STYLE["shuffled"]
    source = resumable(make(), 1, shard=Shard(0, 1, consumed=((4, 2),)))
    assert len(plain(source.batches(0, 2))) == 25 - 8
    assert plain(source.batches(1, 0)) == epochs_of(make(), epochs=2)[1]


def listed(batches: RankBatches, start: int = 0) -> list[list[int]]:
    return [list(positions) for positions in batches.since(start)]


@pytest.mark.parametrize("seed", seeds(usual=20, long=300))
def test_arithmetic_agrees_with_drawing_all_batches(seed: int) -> None:
    draw = random.Random(seed)
    batches = PositionBatches.of(draw.randint(1, 150), draw.randint(1, 6))
    consumed: Consumed = ()
    for _ in range(draw.randint(1, 5)):
        world_size = draw.randint(1, 7)
        for rank in range(world_size):
            shard = Shard(rank, world_size, consumed=consumed)
            own, replicated = batches_of_rank(batches, shard), list[int]()
            every = iter([list(batches[number]) for number in range(len(batches))])  # of all ranks
            expected = list(shard.shard_indices(every, replicated.append))
            assert listed(own) == expected
            assert replicated == ([] if own.replicated_at is None else [own.replicated_at])
            start = draw.randint(0, len(own))
            assert listed(own, start) == expected[start:]
        if not (done := draw.randint(0, len(own))):
            continue
        consumed = (*consumed, (world_size, done))


@pytest.mark.parametrize("seed", seeds(usual=5, long=50))
@pytest.mark.parametrize("even", [True, False])
def test_batches_that_are_not_split_are_dealt_whole(seed: int, even: bool) -> None:
    draw = random.Random(seed)
    batches, world_size = PositionBatches.of(draw.randint(1, 80), draw.randint(1, 5)), draw.randint(1, 6)
    for rank in range(world_size):
        shard = Shard(rank, world_size, even=even)
        every = iter([list(batches[number]) for number in range(len(batches))])
        assert listed(batches_of_rank(batches, shard, splits=False)) == list(shard.shard_batches(every))


def test_a_loader_that_is_sharded_already_is_read_whole() -> None:
    assert listed(batches_of_rank(PositionBatches.of(5, 2), Shard(1, 3, share_data=False))) == [[0, 1], [2, 3], [4]]


# -- streams: each rank and each worker reads shards of its own --------------------------------------


LENGTHS = [7, 3, 11, 1, 6, 9, 4]


class Lines(IterableDataset[Tensor]):
    """Sample j of shard i is the number 100 i + j, plus noise; the order of the shards depends on the epoch."""

    def __init__(self, shards: int = len(LENGTHS), noise: float = 0.0) -> None:
        self.count, self.noise, self.epoch = shards, noise, 0
        self.reads: list[tuple[int, int]] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shards(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.count, generator=generator).tolist()

    def read_shard(self, shard: int, start: int) -> Iterator[Tensor]:
        for number in range(start, LENGTHS[shard]):
            self.reads.append((shard, number))
            yield torch.tensor(100 * shard + number + self.noise * data.noise_of("torch"), dtype=torch.float64)

    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("Cadenza reads the shards")


ALL = Counter(100.0 * shard + number for shard, length in enumerate(LENGTHS) for number in range(length))


def source_of(shard: Shard | None = None, *, replay: bool = False, noise: float = 0.0, **options: Any) -> ResumableLoader:
    options.setdefault("batch_size", 3)
    return resumable(DataLoader(Lines(noise=noise), **options), 1, shard=shard, replay=replay)


def flat(batches: Any) -> Counter[float]:
    return Counter(torch.cat([batch.reshape(-1) for batch in batches]).tolist())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *((ranks, {}) for ranks in (1, 2, 3)),
        *((ranks, {"num_workers": 2}) for ranks in (1, 2)),
        *((ranks, {"num_workers": 3, "batch_size": None}) for ranks in (1, 3)),
    ],
    ids=str,
)
def test_over_ranks_and_workers_each_sample_is_read_once_and_no_shard_of_another_rank(
    ranks: int, options: dict[str, Any]
) -> None:
    seen: Counter[float] = Counter()
    for rank in range(ranks):
        dataset = Lines()
        source = resumable(DataLoader(dataset, **{"batch_size": 3, **options}), 1, shard=Shard(rank, ranks))
        seen += flat(source.batches(0, 0))
        if not options:
            assert {shard for shard, _ in dataset.reads} == set(Lines().shards()[rank::ranks])
    assert seen == ALL


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 3, "batch_size": 2}, {"batch_size": None}], ids=str
)
def test_a_resume_continues_after_any_batch_with_the_same_noise(options: dict[str, Any]) -> None:
    whole = plain(source_of(noise=0.1, **options).batches(2, 0))
    for done in range(1, len(whole)) if not options else (1, 7):
        first, second = source_of(noise=0.1, **options), source_of(noise=0.1, **options)
        reading = first.batches(2, 0)
        begun = plain([next(reading) for _ in range(done)])
        second.load_state_dict(first.state_dict())
        assert begun + plain(second.batches(2, done)) == whole
        replayed = source_of(noise=0.1, replay=True, **options)
        assert done > 1 or plain(replayed.batches(2, done)) == whole[done:]


def test_samples_before_the_position_are_not_read_again() -> None:
    first = source_of()
    reading = first.batches(0, 0)
    for _ in range(5):
        next(reading)
    dataset = Lines()
    second = resumable(DataLoader(dataset, 3), 1)
    second.load_state_dict(first.state_dict())
    rest = flat(second.batches(0, 5))
    assert len(dataset.reads) == rest.total() == ALL.total() - 15


def test_the_model_draws_the_same_numbers_whatever_the_stream_draws() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(source_of(noise=0.1).batches(0, 0))
    assert torch.equal(torch.rand(2), expected)


def test_on_several_ranks_the_length_is_unknown_and_a_stream_without_these_methods_is_read_whole_by_each() -> None:
    class Sized(Lines):
        def __len__(self) -> int:
            return ALL.total()

    assert num_batches(DataLoader(Sized(), 3), Shard()) == 14
    assert num_batches(DataLoader(Sized(), 3), Shard(0, 2)) is None

    class OnlyNames(Lines):
        read_shard = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(6.0))

    read = [plain(resumable(DataLoader(OnlyNames(), 1), 1, shard=Shard(rank, 2)).batches(0, 0)) for rank in range(2)]
    assert read == [[[0.0], [2.0], [4.0]], [[1.0], [3.0], [5.0]]]


def test_errors_name_the_shards_the_ranks_and_the_workers() -> None:
    with pytest.raises(DataError, match=r"Lines\.shards\(\) has 2 shards for 3 ranks; expected at least one"):
        resumable(DataLoader(Lines(2), 3), 1, shard=Shard(1, 3)).batches(0, 0)
    source = source_of(num_workers=2)
    next(source.batches(0, 0))
    other = source_of()
    other.load_state_dict(source.state_dict())
    with pytest.raises(DataError, match="2 workers of each rank read the shards, and the loader has 1"):
        other.batches(0, 1)
    with pytest.raises(DataError, match="holds no position for this loader"):
        source_of().batches(0, 1)


def trained(directory: Path, steps: int, ranks: int) -> tuple[list[list[float]], Tensor]:
    """Train on this rank until a step; return its batches and the weights."""
    seen: list[list[float]] = []
    see = on(Callback.on_batch_start)(lambda run, batch: seen.append(batch.tolist()))
    torch.manual_seed(0)
    run = tiny_trainer(
        model=nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
        loader=DataLoader(Lines(noise=0.1), 2, num_workers=1),
        compute_loss=lambda model, batch: model(batch[:, None].float() / 700).square().mean(),
        steps=steps,
        seed=1,
        directory=directory,
        driver=DdpDriver("cpu") if ranks > 1 else SingleDriver("cpu"),
        callbacks=[see, Checkpoint("100 steps"), Evaluate(DataLoader(Lines(), 4))],
    ).fit(resume="auto")
    return seen, torch.cat([one.detach().flatten() for one in run.model.parameters()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_inside_an_epoch_to_the_same_bits_on_as_many_ranks(ranks: int, tmp_path: Path) -> None:
    def parts() -> list[tuple[list[list[float]], Tensor]]:
        return [trained(tmp_path / name, steps, ranks) for name, steps in (("a", 12), ("b", 3), ("b", 12))]

    for (expected, weights), (begun, _), (rest, resumed) in [parts()] if ranks == 1 else launch(parts):
        assert begun + rest == expected
        assert torch.equal(resumed, weights)
    if ranks == 2:
        with pytest.raises(DataError, match="an epoch that 2 ranks began"):
            trained(tmp_path / "b", 14, 1)
