"""An epoch that multiple ranks read in succession: every sample once, with the noise of its index."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza.loading import Consumed, Shard, resumable
from cadenza.loading.loaders import Limited
from cadenza.loading.shards import PositionBatches, RankBatches, Replicated, batches_of_rank
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
