"""The positions of a rank, computed by arithmetic, are those that it gets when all batches are drawn one after another."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cadenza.loading import Consumed, Shard
from cadenza.loading.rounds import PositionBatches, RankBatches, batches_of_rank


def drawn(batches: PositionBatches, shard: Shard) -> tuple[list[Any], list[int]]:
    """Return the batches of a rank from those of all ranks, and the numbers of those that are replicated."""
    replicated: list[int] = []
    every = iter([list(batches[number]) for number in range(len(batches))])
    return list(shard.shard_indices(every, replicated.append)), replicated


def listed(batches: RankBatches, start: int = 0) -> list[list[int]]:
    return [list(positions) for positions in batches.since(start)]


@pytest.mark.parametrize("seed", range(300))
def test_arithmetic_agrees_with_drawing_all_batches(seed: int) -> None:
    draw = random.Random(seed)
    batches = PositionBatches.of(draw.randint(1, 150), draw.randint(1, 6))
    consumed: Consumed = ()
    for _ in range(draw.randint(1, 5)):
        world_size = draw.randint(1, 7)
        for rank in range(world_size):
            shard = Shard(rank, world_size, consumed=consumed)
            own, (expected, replicated) = batches_of_rank(batches, shard), drawn(batches, shard)
            assert listed(own) == expected
            assert replicated == ([] if own.replicated_at is None else [own.replicated_at])
            start = draw.randint(0, len(own))
            assert listed(own, start) == expected[start:]
        if not (done := draw.randint(0, len(own))):
            continue
        consumed = (*consumed, (world_size, done))


@pytest.mark.parametrize("seed", range(50))
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
