"""The batches that each rank reads: W ranks consume in one step the batches that one process consumes in W."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from cadenza.errors import DataError
from cadenza.loading.loaders import is_of
from cadenza.loading.rng import derive_seed
from cadenza.status.formats import counted


def _alone(flag: bool) -> Callable[[], int]:
    return lambda: int(flag)


Consumed = tuple[tuple[int, int], ...]
"""The consumed part of an epoch, in order: pairs ``(world size, rounds)``. A round is one batch on each rank.

A round with the world size 0 consumed nothing: its step was lost, and its batches are read again.
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a training or evaluation loader that one rank reads.

    >>> [list(Shard(rank, 2).shard_indices(iter([[0, 1, 2], [3, 4, 5], [6]]))) for rank in range(2)]
    [[[0], [3, 4]], [[1, 2], [5, 6]]]
    """

    rank: int = 0
    """The index of this process among all."""
    world_size: int = 1
    """The number of processes."""
    any_rank: Callable[[bool], bool] = bool
    """Returns whether a flag is true on any rank. Every rank must call it."""
    least: Callable[[int], int] = int
    """Returns the least of the numbers of all ranks. Every rank must call it."""
    count_later: Callable[[bool], Callable[[], int]] = field(default=_alone, repr=False)
    """Starts to count the ranks with a true flag; returns a function that waits for their number. Every rank must call both."""
    share_data: bool = True
    """Whether Cadenza shards the loader. False: the loader of each rank yields only the shard of this rank."""
    even: bool = True
    """Whether all ranks must get the same number of batches, as in training."""
    consumed: Consumed = ()
    """The part of the epoch that was consumed with other world sizes, before this run resumed."""

    def uneven(self) -> Shard:
        """Return the shard for an evaluation: batches are not split, and some ranks may get one more than others."""
        return replace(self, even=False)

    def resumed(self, consumed: Consumed) -> Shard:
        """Return the shard for the rest of an epoch after `consumed`."""
        return replace(self, consumed=consumed)

    def for_loader(self, loader: Any) -> Shard:
        """Return the shard for `loader`: with ``share_data=False`` if the loader is sharded already.

        Raises:
            DataError: The loader is sharded for another world size.
        """
        sharded = self.share_data and self.world_size > 1 and _is_sharded(loader, self.world_size)
        return replace(self, share_data=False) if sharded else self

    def global_index(self, number: int) -> int:
        """Return the index in the epoch, over all ranks, of batch `number` of this rank. Its random numbers depend on it."""
        return self.consumed_batches + number * self.world_size + self.rank

    @property
    def consumed_rounds(self) -> int:
        """The number of rounds in `consumed`."""
        return sum(rounds for _, rounds in self.consumed)

    @property
    def consumed_batches(self) -> int:
        """The number of batches in `consumed`, over all ranks."""
        return sum(world_size * rounds for world_size, rounds in self.consumed)

    def first_of_round(self, number: int) -> int:
        """Return the index in the epoch, over all ranks, of the first batch of a round.

        >>> Shard(0, 3, consumed=((2, 4),)).first_of_round(5)
        11
        """
        before, left = 0, number
        for world_size, rounds in self.consumed:
            taken = min(left, rounds)
            before, left = before + world_size * taken, left - taken
        return before + left * self.world_size

    def at_round(self, number: int) -> tuple[Shard, int]:
        """Return the shard from round `number` of an epoch on, and how many of the rounds before had the current world size.

        At round 0, nothing of the epoch is consumed.
        """
        return (self, number - self.consumed_rounds) if number else (replace(self, consumed=()), 0)

    def limit(self, count: int) -> int:
        """Return how many batches this rank reads with a limit of `count`: as many in training, its shard in an evaluation."""
        return count if self.even or not self.share_data else len(range(self.rank, count, self.world_size))

    def length(self, batches: int | None, batch_size: int | None) -> int | None:
        """Return how many of `batches` batches this rank reads; None if `batches` is None."""
        if batches is None or not self.share_data:
            return batches
        if not self.even:
            return self.limit(batches)
        full, rest = divmod(batches, self.world_size)
        return full + (rest > 0 and batch_size is not None and batch_size > 1)

    def shard_indices(
        self, batches: Iterator[Sequence[Any]], on_replicated: Callable[[int], object] = lambda number: None
    ) -> Iterator[Any]:
        """Yield the batches of indices of this rank: all of them if the sampler is sharded already.

        Each rank gets the same number of batches. If the last batches are fewer than the ranks, their samples and those of the
        previous round are split evenly over the ranks, so that each sample is used exactly once. Batches in `consumed` are
        skipped. Before a batch that is the same on all ranks, `on_replicated` is called with its number in the epoch.
        """
        if not self.share_data:
            yield from batches
        elif not self.even:
            yield from self.shard_batches(batches)
        else:
            for number, round_ in enumerate(self.rounds(batches), self.consumed_rounds):
                if isinstance(round_, Replicated):
                    on_replicated(number)
                yield round_[self.rank]

    def rounds(self, batches: Iterator[Sequence[Any]]) -> Iterator[list[Any]]:
        """Yield the rounds after `consumed`: in each, the batches of indices of all ranks."""
        for world_size, done in self.consumed:
            batches = _remaining(batches, world_size, done)
        return _rounds(batches, self.world_size)

    def shard_batches(self, batches: Iterator[Any], *, ahead: bool = False) -> Iterator[Any]:
        """Yield the batches of this rank. In training, an incomplete last round is dropped (`ahead`: see `until_any_ends`)."""
        if self.world_size == 1 or not self.share_data:
            yield from self.until_any_ends(batches, ahead=ahead)
        else:
            while round_ := list(islice(batches, self.world_size)):
                if len(round_) == self.world_size or (not self.even and self.rank < len(round_)):
                    yield round_[self.rank]

    def until_any_ends(self, batches: Iterator[Any], length: int | None = None, *, ahead: bool = False) -> Iterator[Any]:
        """Yield all batches. If the loaders are sharded already, training ends with the first rank that has no more batches.

        Otherwise the other ranks would wait for it in a collective. If the loaders of all ranks have a length, they exchange it
        once. Otherwise they exchange for each batch whether one of them has no more: with `ahead` while they train on the one
        before, otherwise they wait.

        Args:
            batches: The batches of this rank.
            length: How many they are; None if that is not known.
            ahead: Whether a batch may be read before the one before it is used.

        Raises:
            DataError: There are not as many batches as `length` says.
        """
        if self.world_size == 1 or self.share_data or not self.even:
            yield from batches
            return
        none: Any = object()
        if (least := self.least(-1 if length is None else length)) >= 0:
            for number in range(least):
                if (batch := next(batches, none)) is none:
                    raise DataError(_WRONG_LENGTH.format(length=length, came=f"only {number}"))
                yield batch
            if least == length and next(batches, none) is not none:
                raise DataError(_WRONG_LENGTH.format(length=length, came="more"))
            return
        ends = self.any_rank((batch := next(batches, none)) is none)
        while not ends:
            if ahead:
                arrives = self.count_later((following := next(batches, none)) is none)
                yield batch
                batch, ends = following, arrives() > 0
            else:
                yield batch
                ends = self.any_rank((batch := next(batches, none)) is none)


_WRONG_LENGTH = (
    "the training loader of this rank, which is sharded already, says that it has {length} more batches in this epoch, and "
    "returned {came}. The ranks agree on the end of the epoch by these lengths. Give its sampler the right __len__."
)


class Replicated(list[Any]):
    """A round in which all ranks get the same batch, because fewer samples are left than ranks.

    The mean of their gradients is the gradient of one process, so each sample counts once.
    """


def _rounds(batches: Iterator[Sequence[Any]], world_size: int) -> Iterator[list[Any]]:
    """Yield the rounds of an epoch for a world size, until no sample is left."""
    held: list[Sequence[Any]] = []
    while round_ := list(islice(batches, world_size)):
        if len(round_) < world_size:
            yield from _split([index for batch in (*held, *round_) for index in batch], world_size, 2 if held else 1)
            return
        if held:
            yield held
        held = round_
    if held:
        yield held


def _split(samples: list[Any], world_size: int, rounds: int) -> Iterator[list[Any]]:
    """Yield at most `rounds` rounds that split `samples` evenly."""
    if len(samples) < world_size:
        yield Replicated([samples] * world_size)
        return
    count = world_size * rounds if len(samples) >= world_size * rounds else world_size
    cuts = [index * len(samples) // count for index in range(count + 1)]
    batches = [samples[start:end] for start, end in pairwise(cuts)]
    for first in range(0, count, world_size):
        yield batches[first : first + world_size]


def _remaining(batches: Iterator[Sequence[Any]], world_size: int, done: int) -> Iterator[Sequence[Any]]:
    """Return the batches that are left after `done` rounds with a world size; in a round, those of rank 0 come first."""
    around = list(islice(batches, (done - 1) * world_size, (done + 1) * world_size))  # the last done round and the next one
    if world_size < len(around) < 2 * world_size:  # these two rounds were split anew, and the first of them is done
        return chain.from_iterable(islice(_rounds(iter(around), world_size), 1, None))
    return chain(around[world_size:], batches)


def check_enough_batches(loader: Any, batches: int | None, shard: Shard, what: str) -> None:
    """Raise `DataError` if a loader that Cadenza shards has fewer batches than there are ranks."""
    if batches is not None and batches < shard.world_size and shard.for_loader(loader).share_data:
        raise DataError(
            f"{what} has {counted(batches, 'batch')} for {counted(shard.world_size, 'rank')}; expected at least one "
            "batch per rank. Use fewer ranks "
            "or a smaller batch size, or pass a loader that is sharded already, with a DistributedSampler or "
            "DdpDriver(share_data=False)."
        )


def _is_sharded(loader: Any, world_size: int) -> bool:
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    parts: Iterable[Any] = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in parts:
        replicas = getattr(part, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1:  # a sampler for one rank reads all data
            if replicas != world_size:
                raise DataError(
                    f"{type(part).__name__} has num_replicas={replicas}, but there are {counted(world_size, 'rank')}. "
                    "Create it with "
                    f"num_replicas={world_size}."
                )
            return True
    dataset = getattr(loader, "dataset", loader)
    if is_of(dataset, "streaming", "StreamingDataset"):  # of MosaicML: it reads RANK and WORLD_SIZE
        return True
    if has_shards(dataset):
        return True
    # A streamed data set of Hugging Face after split_dataset_by_node, or a WebDataset with split_by_node.
    return getattr(dataset, "_distributed", None) is not None or _is_split_by_node(loader)


def has_shards(dataset: object) -> bool:
    """Return whether a data set is an `IterableDataset` with ``shards()`` and ``read_shard(shard, start)``."""
    methods = (getattr(dataset, name, None) for name in ("shards", "read_shard"))
    return isinstance(dataset, IterableDataset) and all(map(callable, methods))


def _is_split_by_node(loader: Any) -> bool:
    """Return whether a pipeline of WebDataset, or the pipeline that it reads from, keeps the shards of this rank alone."""
    stages = getattr(loader, "pipeline", None)
    inner = getattr(loader, "dataset", None)
    return (isinstance(stages, list) and any(_is_split_by_node(stage) for stage in stages)) or (
        getattr(loader, "__name__", None) == "split_by_node" or (inner is not None and _is_split_by_node(inner))
    )


# -- orders ----------------------------------------------------------------------------------------
# The order of the samples in an epoch, read at any position, and the positions that a rank reads, by arithmetic. Nothing here
# takes longer with more ranks, more samples or a later position. `Shard.shard_indices` applies the same rules to batches that
# must be drawn one after another.

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
        left = iter(batches)
        while (batch := next(left, None)) is not None:
            held = [batch, *islice(left, CHUNK // max(len(batch), 1))]
            sizes = [*map(len, held)]
            if sum(sizes) == held[-1].stop - batch.start:  # in one piece, as on a single rank
                positions = torch.arange(batch.start, held[-1].stop)
            else:
                positions = torch.cat([torch.arange(batch.start, batch.stop) for batch in held])
            yield from self._indices(positions).split(sizes)

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
            batches = Rounds.of(batches, world_size).after(done) if world_size else batches
        rounds = Rounds.of(batches, shard.world_size)
        last = shard.consumed_rounds + len(rounds) - 1
        return RankBatches(rounds, shard.rank, len(rounds), last if rounds.replicated else None)
    left = batches.drop(shard.consumed_batches)
    count = len(left) // shard.world_size if shard.even else len(range(shard.rank, len(left), shard.world_size))
    return RankBatches(Rounds(left, shard.world_size, len(left), left, False), shard.rank, count)
