"""The positions that a rank reads, by arithmetic: nothing here takes longer with more ranks, more samples or a later position.

`cadenza.loading.shards` applies the same rules to batches that must be drawn one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cadenza.loading.shards import Shard


@dataclass(frozen=True, slots=True)
class PositionBatches:
    """Consecutive batches of positions in the order of an epoch.

    >>> [list(PositionBatches(0, 5, count=3, size=2)[number]) for number in range(3)]
    [[0, 1], [2, 3], [4]]
    >>> [list(PositionBatches(0, 5, count=2)[number]) for number in range(2)]
    [[0, 1], [2, 3, 4]]
    """

    start: int
    """The first position of batch 0, also if batches were dropped."""
    end: int
    """The position after the last one."""
    count: int
    """The number of batches, with those that were dropped."""
    size: int | None = None
    """The number of positions in a batch; the last one may have fewer. None: they are split evenly."""
    dropped: int = 0

    @staticmethod
    def of(samples: int, size: int) -> PositionBatches:
        """Return the batches of an epoch."""
        return PositionBatches(0, samples, -(-samples // size), size)

    def __len__(self) -> int:
        return self.count - self.dropped

    def __getitem__(self, number: int) -> range:
        return range(self._cut(number), self._cut(number + 1))

    def drop(self, count: int) -> PositionBatches:
        """Return the batches from number `count` on."""
        return replace(self, dropped=min(self.dropped + count, self.count))

    def samples(self) -> int:
        """Return the number of positions in all batches that are left."""
        return self.end - self._cut(0)

    def split(self, count: int) -> PositionBatches:
        """Return all positions that are left in `count` even batches."""
        return PositionBatches(self._cut(0), self.end, count)

    def _cut(self, number: int) -> int:
        number += self.dropped
        if self.size is None:
            return self.start + number * (self.end - self.start) // self.count
        return min(self.start + number * self.size, self.end)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rest of an epoch in rounds of one batch on each rank. See `Shard.shard_indices` for the rules.

    >>> rounds = Rounds.of(PositionBatches.of(14, 4), 3)
    >>> len(rounds), [list(rounds.batch(1, rank)) for rank in range(3)]
    (2, [[7, 8], [9, 10], [11, 12, 13]])
    """

    batches: PositionBatches
    world_size: int
    whole: int
    """The number of rounds with batches of the loader. Those after them are in `tail`."""
    tail: PositionBatches
    replicated: bool
    """Whether all ranks get the whole `tail`, because it has fewer samples than there are ranks."""

    @staticmethod
    def of(batches: PositionBatches, world_size: int) -> Rounds:
        """Return the rounds of a world size."""
        whole, rest = divmod(len(batches), world_size)
        if not rest:
            return Rounds(batches, world_size, whole, batches.drop(len(batches)), False)
        whole = max(whole - 1, 0)
        tail = batches.drop(whole * world_size)
        samples = tail.samples()
        if samples < world_size:
            return Rounds(batches, world_size, whole, tail.split(1), True)
        rounds = 2 if len(tail) > world_size and samples >= 2 * world_size else 1
        return Rounds(batches, world_size, whole, tail.split(rounds * world_size), False)

    def __len__(self) -> int:
        return self.whole + (1 if self.replicated else len(self.tail) // self.world_size)

    def batch(self, number: int, rank: int) -> range:
        """Return the positions that a rank reads in round `number`."""
        if number < self.whole:
            return self.batches[number * self.world_size + rank]
        return self.tail[0] if self.replicated else self.tail[(number - self.whole) * self.world_size + rank]

    def after(self, number: int) -> PositionBatches:
        """Return the batches that are left after `number` rounds. Rounds that were split stay split once they have begun."""
        if number <= self.whole:
            return self.batches.drop(number * self.world_size)
        return self.tail.drop((number - self.whole) * self.world_size)


@dataclass(frozen=True, slots=True)
class RankBatches:
    """The batches that one rank reads after `Shard.consumed`, as ranges of positions."""

    rounds: Rounds
    rank: int
    length: int
    replicated_at: int | None = None
    """The number in the epoch of a batch that is the same on all ranks."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> range:
        return self.rounds.batch(number, self.rank)

    def since(self, number: int) -> Iterator[range]:
        """Yield the batches from number `number` on."""
        return map(self.__getitem__, range(number, self.length))


def batches_of_rank(batches: PositionBatches, shard: Shard, *, splits: bool = True) -> RankBatches:
    """Return the batches of an epoch that a rank reads.

    Args:
        batches: All batches of the epoch.
        shard: The shard of the rank.
        splits: Whether the samples of the last rounds are split over the ranks. Otherwise an incomplete last round is dropped
            in training.
    """
    if not shard.share_data:
        return RankBatches(Rounds.of(batches, 1), 0, len(batches))
    if splits and shard.even:
        for world_size, done in shard.consumed:
            batches = Rounds.of(batches, world_size).after(done)
        rounds = Rounds.of(batches, shard.world_size)
        last = shard.consumed_rounds + len(rounds) - 1
        return RankBatches(rounds, shard.rank, len(rounds), last if rounds.replicated else None)
    left = batches.drop(shard.consumed_batches)
    count = len(left) // shard.world_size if shard.even else len(range(shard.rank, len(left), shard.world_size))
    return RankBatches(Rounds(left, shard.world_size, len(left), left, False), shard.rank, count)
