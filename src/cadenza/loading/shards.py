"""The shard of the data that each rank reads. W ranks consume in one step the batches that one process consumes in W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any

from torch.utils.data import IterableDataset

from cadenza.errors import DataError
from cadenza.loading.loaders import is_of
from cadenza.status.formats import counted


def _alone(flag: bool) -> Callable[[], int]:
    return lambda: int(flag)


Consumed = tuple[tuple[int, int], ...]
"""The consumed part of an epoch, in order: pairs ``(world size, rounds)``. A round is one batch on each rank."""


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
