"""The order of the samples in an epoch, read at any position, and the positions that a rank reads, by arithmetic.

Nothing here takes longer with more ranks, more samples or a later position. `cadenza.loading.shards` applies the
same rules to batches that must be drawn one after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import Tensor

from cadenza.loading.rng import derive_seed
from cadenza.loading.shards import Shard

PERMUTED = 2**20
"""Up to this number of samples, a shuffled order is torch's permutation, in memory. Above it, the order is a `KeyedOrder`."""

CHUNK = 1024  # positions of a keyed order that are computed together, because a tensor operation has a fixed cost


class Order(ABC):
    """The samples of an epoch by position. Positions count from 0 over all ranks."""

    @abstractmethod
    def at(self, positions: range) -> Tensor:
        """Return the indices of the samples at these positions, shape (len(positions),), int64."""

    def read(self, batches: Iterable[range]) -> Iterator[Tensor]:
        """Yield the indices of the samples in each batch of positions."""
        return map(self.at, batches)


class Unshuffled(Order):
    """The order of the data set."""

    def at(self, positions: range) -> Tensor:
        return torch.arange(positions.start, positions.stop)


class Permutation(Order):
    """The order that torch draws for all samples, with 8 bytes for each.

    Args:
        samples: The number of samples.
        generator: The generator that determines the order.
        device: The device that holds the indices; they are drawn on the host, so that they are the same on every device.
    """

    def __init__(self, samples: int, generator: torch.Generator, device: torch.device | None = None) -> None:
        self._order = torch.randperm(samples, generator=generator).to(device or "cpu")

    def at(self, positions: range) -> Tensor:
        return self._order[positions.start : positions.stop]


class KeyedOrder(Order):
    """A shuffled order that is computed for the positions that are read. It takes no memory, whatever the number of samples.

    The construction is the generalized Feistel cipher over ``range(rows * columns)`` with cycle walking, methods 3 and 2 of
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. A position is split into a row and a column. Each
    round adds a keyed function of one to the other, so it can be inverted, and the whole is a bijection. ``rows * columns`` is
    larger than the number of samples by less than ``rows``, about its square root; a result outside is mapped again.

    Args:
        samples: The number of samples, at most 2**62.
        key: The order depends on the key and on the number of samples alone.
        device: The device that receives the indices. They are computed on the host.
    """

    def __init__(self, samples: int, key: int, device: torch.device | None = None) -> None:
        self._samples, self._device = samples, device
        self._rows = isqrt(max(samples - 1, 0)) + 1
        self._columns = -(-samples // self._rows)
        self._keys = [derive_seed(key, samples, number) & _LOW for number in range(ROUNDS)]

    def at(self, positions: range) -> Tensor:
        return self._indices(torch.arange(positions.start, positions.stop))

    def read(self, batches: Iterable[range]) -> Iterator[Tensor]:
        held: list[range] = []
        for batch in batches:
            held.append(batch)
            if sum(map(len, held)) >= CHUNK:
                yield from self._read(held)
                held = []
        if held:
            yield from self._read(held)

    def _read(self, batches: list[range]) -> Iterator[Tensor]:
        positions = torch.cat([torch.arange(batch.start, batch.stop) for batch in batches])
        return iter(self._indices(positions).split([len(batch) for batch in batches]))

    def _indices(self, positions: Tensor) -> Tensor:
        indices = self._mapped(positions)
        while len(outside := (indices >= self._samples).nonzero()[:, 0]):
            indices[outside] = self._mapped(indices[outside])
        if self._device is None or self._device.type != "cuda":
            return indices if self._device is None else indices.to(self._device)
        return indices.pin_memory().to(self._device, non_blocking=True)  # else the host waits for the device

    def _mapped(self, positions: Tensor) -> Tensor:
        """Return a bijection of ``range(rows * columns)``, shape (N,) -> (N,)."""
        row, column = positions // self._columns, positions % self._columns
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mixed(column, first)).remainder_(self._rows)
            column = (column + _mixed(row, second)).remainder_(self._columns)
        return row * self._columns + column


ROUNDS = 8  # an even number; with 6, the differences of neighbours among fewer than 100 samples are not uniform
_LOW = 2**32 - 1


def _mixed(values: Tensor, key: int) -> Tensor:
    """Return a keyed hash below 2**55 of values below 2**32, shape (N,) -> (N,). No product exceeds int64."""
    mixed = (values ^ key) * 0x7FEB352D
    mixed ^= mixed >> 32
    mixed = (mixed & _LOW) * 0x7A5662DB
    mixed ^= mixed >> 29
    return mixed >> 8


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
