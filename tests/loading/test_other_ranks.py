"""An epoch that is done by one number of ranks after the other: every sample once, and noise by its place alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza.loading import Past, Positioned, Share, batches_in, positioned
from cadenza.loading.batches import Limited
from cadenza.loading.shards import Alike
from tests.loading.data import Keeping, Numbers, Shuffled, Stream, epochs_of, loader_of, noisy_collate, plain, seeded

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata, when it makes a loader

Batches = list[list[int]]


def batches_of(sizes: Iterable[int]) -> Batches:
    """Return batches of the numbers 0, 1, 2, ... with these sizes."""
    return [list(range(start, end)) for start, end in pairwise((0, *accumulate(sizes)))]


def turns_of(batches: Batches, ranks: int, past: Past = ()) -> list[list[list[int]]]:
    """Return the turns that so many ranks would do after `past`."""
    return list(Share(0, ranks, past=past).turns(iter(batches)))


def done_by(batches: Batches, chain: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Return all turns of an epoch that each number of ranks in turn did a part of, the last one to the end."""
    done: list[list[list[int]]] = []
    past: Past = ()
    for number, (ranks, limit) in enumerate(chain):
        turns = turns_of(batches, ranks, past)
        turns = turns if number == len(chain) - 1 else turns[:limit]
        done += turns
        past = (*past, (ranks, len(turns)))
        if not turns:
            past = past[:-1]
    return done


def sizes_drawn(draw: random.Random) -> list[int]:
    """Return the sizes of an epoch's batches: all alike but the last."""
    size = draw.randint(1, 5)
    return [size] * draw.randint(0, 30) + [draw.randint(1, size)]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_the_sizes_and_the_chain_every_sample_comes_once(seed: int) -> None:
    draw = random.Random(seed)
    batches = batches_of(sizes_drawn(draw))
    chain = [(draw.randint(1, 6), draw.randint(0, 6)) for _ in range(draw.randint(1, 5))]
    seen: Counter[int] = Counter()
    for turn in done_by(batches, chain):
        assert all(turn), "no rank is without a sample"
        for batch in turn[:1] if isinstance(turn, Alike) else turn:
            seen.update(batch)
    assert seen == Counter(index for batch in batches for index in batch)


@pytest.mark.parametrize("seed", range(100))
def test_a_cut_changes_nothing_for_as_many_ranks(seed: int) -> None:
    draw = random.Random(seed)
    batches, ranks = batches_of(sizes_drawn(draw)), draw.randint(1, 5)
    whole = turns_of(batches, ranks)
    for done in range(1, len(whole) + 1):
        assert turns_of(batches, ranks, ((ranks, done),)) == whole[done:]


def test_batches_that_come_out_even_stay_whole_and_in_order() -> None:
    batches = batches_of([3] * 24)
    turns = done_by(batches, [(4, 2), (2, 3), (1, 4), (3, 0)])
    assert [batch for turn in turns for batch in turn] == batches
    assert [len(turn) for turn in turns] == [4] * 2 + [2] * 3 + [1] * 4 + [3] * 2


def test_the_end_is_dealt_out_to_the_ranks_that_are_there_then() -> None:
    batches = batches_of([3, 3, 3, 3, 3, 2])
    one, two = turns_of(batches, 4)
    assert [len(batch) for batch in (*one, *two)] == [2, 2, 2, 2, 2, 2, 2, 3]
    left = turns_of(batches, 1, ((4, 1),))
    assert [batch for (batch,) in left] == two, "what had been dealt out stays so, once begun"
    assert turns_of(batches, 2, ((4, 1),)) == [two[:2], two[2:]]


def test_fewer_samples_than_ranks_are_done_by_all() -> None:
    (turn,) = turns_of(batches_of([4, 4, 2]), 3, ((1, 2),))
    assert turn == [[8, 9]] * 3
    assert isinstance(turn, Alike)
    assert turns_of(batches_of([4, 4, 2]), 2, ((1, 2),)) == [[[8], [9]]]


# -- loaders -------------------------------------------------------------------------------------------


def read(make: Callable[[], Iterable[Any]], chain: list[tuple[int, int]], epoch: int, *, replay: bool = False) -> list[Any]:
    """Return the batches of an epoch, in the order of their turns, that each number of ranks in turn did a part of."""
    done: list[Any] = []
    past: Past = ()
    state: dict[str, Any] | None = None
    for number, (ranks, limit) in enumerate(chain):
        skip = sum(turns for _, turns in past)
        length = batches_in(make(), Share(0, ranks, past=past) if skip else Share(0, ranks))
        sources = [positioned(make(), 1, share=Share(rank, ranks, past=past), replay=replay) for rank in range(ranks)]
        own = [_begun(source, state, epoch, skip) for source in sources]
        last = number == len(chain) - 1
        turns = list(islice(zip(*own, strict=last), None if last else limit))
        assert not last or length is None or skip + len(turns) == length, "the length is known before"
        done += [batch for turn in turns for batch in turn]
        past, state = (*past, (ranks, len(turns))), sources[0].state_dict()
    return plain(done)


def _begun(source: Positioned, state: dict[str, Any] | None, epoch: int, skip: int) -> Iterator[Any]:
    if state is not None:
        source.load_state_dict(state)
    return source.batches(epoch, skip)


CHAIN = [(4, 2), (2, 1), (1, 3), (3, 0)]
MAP_STYLE: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: loader_of(Numbers(samples=97), shuffle=True, generator=seeded(3)),
    "with workers": lambda: loader_of(Numbers(samples=97), shuffle=True, num_workers=2),
    "with small batches": lambda: loader_of(Numbers(samples=29), batch_size=2, shuffle=True),
    "one by one": lambda: loader_of(Numbers(samples=19), batch_size=1, shuffle=True),
}


@pytest.mark.parametrize("name", MAP_STYLE)
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_map_style_loader_gives_every_sample_once(name: str, epoch: int) -> None:
    batches = read(MAP_STYLE[name], CHAIN, epoch)
    samples = MAP_STYLE[name]().dataset.samples  # type: ignore[attr-defined]
    assert sorted(number for batch in batches for number in batch) == list(range(samples))


EVEN: dict[str, Callable[[], Iterable[Any]]] = {
    "map-style": lambda: loader_of(Numbers("torch", "numpy", samples=96), shuffle=True, collate_fn=noisy_collate),
    "no batches": lambda: DataLoader(Numbers("torch", samples=24), batch_size=None, shuffle=True),
    "a list": lambda: [[index, index + 1] for index in range(24)],
    "limited": lambda: Limited(loader_of(Numbers("torch", samples=400), shuffle=True), 8),
}


@pytest.mark.parametrize("name", EVEN)
def test_noise_and_order_are_those_of_one_process(name: str) -> None:
    whole = epochs_of(EVEN[name](), epochs=2)[1]
    done = read(EVEN[name], [(4, 2), (2, 1), (1, 2), (3, 0)], 1)
    if name == "limited":  # a turn is a batch of each rank: it says how many turns
        assert len(done) == 4 * 2 + 2 * 1 + 1 * 2 + 3 * 3
        whole = epochs_of(loader_of(Numbers("torch", samples=400), shuffle=True), epochs=2)[1][: len(done)]
    assert done == whole


STATEFUL: dict[str, Callable[[], Iterable[Any]]] = {
    "a stream in a loader": lambda: loader_of(Keeping(), batch_size=1),
    "a loader": lambda: StatefulDataLoader(Numbers(samples=22), batch_size=1),
    "a loader with workers": lambda: StatefulDataLoader(Numbers(samples=22), batch_size=1, num_workers=2),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_loader_with_a_state_goes_on_where_the_turn_ended(name: str) -> None:
    whole = epochs_of(STATEFUL[name](), epochs=1)[0]
    assert read(STATEFUL[name], [(4, 2), (2, 1), (1, 3), (3, 0)], 0) == whole[: 13 + 9]


def test_what_starts_at_the_beginning_is_read_up_to_there_when_asked_to() -> None:
    def make() -> DataLoader[Any]:
        return loader_of(Stream(), batch_size=1)

    whole = epochs_of(make(), epochs=3)[2]
    assert read(make, CHAIN, 2, replay=True) == whole[: 13 + 9]


def test_a_sampler_of_batches_that_knows_no_size_is_dealt_out_as_well() -> None:
    class Uneven(Shuffled):
        """Batches of 1, 2, 3, 1, 2, 3, ... samples."""

        def __len__(self) -> int:
            return 11

        def __iter__(self) -> Iterator[Any]:
            order = list(super().__iter__())
            for number in range(11):
                size = 1 + number % 3
                yield order[:size]
                del order[:size]

    def make() -> DataLoader[Any]:
        return loader_of(Numbers(), batch_sampler=Uneven("torch"))

    batches = read(make, [(3, 1), (2, 2), (1, 0)], 1)
    whole = epochs_of(make(), epochs=2)[1]
    assert sorted(number for batch in batches for number in batch) == sorted(number for batch in whole for number in batch)


def test_the_next_epoch_begins_anew() -> None:
    make = MAP_STYLE["shuffled"]
    source = positioned(make(), 1, share=Share(0, 1, past=((4, 2),)))
    assert len(plain(source.batches(0, 2))) == 25 - 8
    assert plain(source.batches(1, 0)) == epochs_of(make(), epochs=2)[1]
