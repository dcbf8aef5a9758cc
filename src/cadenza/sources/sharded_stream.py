"""Streams that consist of shards: each rank and each worker reads its own, from a position that is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cadenza.errors import DataError
from cadenza.loading.batches import CountedBatch
from cadenza.loading.loaders import set_loader_epoch
from cadenza.loading.resumable_base import END, ResumableLoader, no_position, read_with_seeds
from cadenza.loading.rng import derive_seed, isolated_rng, seed_host
from cadenza.loading.seeded import worker_options
from cadenza.loading.shards import Shard
from cadenza.status.formats import counted


class Position(NamedTuple):
    """The position of one worker after a sample."""

    worker: int
    """The number of the worker among those that read this rank's shards, whatever process does its work after a resume."""
    shard: int
    """The number of the shard among those of this worker."""
    start: int
    """The number of samples of the shard that were read."""
    samples: int
    """The number of samples that the worker has read in this epoch."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A sample, or a counted batch, and the position after it."""

    value: Any
    position: Position

    def pin_memory(self) -> _Placed:
        return replace(self, value=self.value.pin_memory())


class _Collate:
    """Collates the samples of one worker, and keeps the position after the last one."""

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate, self._batched = collate, batched

    def __call__(self, placed: Any) -> _Placed:
        if not self._batched:
            return _Placed(CountedBatch(self._collate(placed.value), None), placed.position)
        return _Placed(CountedBatch(self._collate([position.value for position in placed]), len(placed)), placed[-1].position)


class _OwnShards(IterableDataset[_Placed]):
    """The samples in the shards of one worker of one rank, from a position on."""

    def __init__(self, dataset: Any, part: tuple[int, int], seed: tuple[int, ...], size: int, start: StreamPosition) -> None:
        self.dataset, self._part, self._seed, self._size, self._start = dataset, part, seed, size, start

    def __iter__(self) -> Iterator[_Placed]:
        info, (rank, ranks) = get_worker_info(), self._part
        process, workers = (0, 1) if info is None else (info.id, info.num_workers)
        worker = (process + self._start.turn) % workers  # the loader asks its first process first
        shards = list(self.dataset.shards())[rank::ranks][worker::workers]
        first, start, samples = self._start.of(worker)
        for number in range(first, len(shards)):
            reading = iter(self.dataset.read_shard(shards[number], start))
            while True:
                if samples % self._size == 0:  # the random numbers of a batch depend on its number alone
                    seed_host(derive_seed(*self._seed, worker, samples // self._size))
                if (sample := next(reading, END)) is END:
                    break
                start, samples = start + 1, samples + 1
                yield _Placed(sample, Position(worker, number, start, samples))
            start = 0


class StreamPosition:
    """How far each worker of a rank has read, and which one is next."""

    def __init__(self, workers: int) -> None:
        self.workers: int = workers
        self.turn: int = 0
        """The number of the worker with the next batch."""
        self._reached: dict[int, Position] = {}

    def of(self, worker: int) -> tuple[int, int, int]:
        """Return shard, start and number of samples of a worker."""
        reached = self._reached.get(worker)
        return (0, 0, 0) if reached is None else reached[1:]

    def reach(self, position: Position) -> None:
        """Move to the position after a batch."""
        self._reached[position.worker] = position
        self.turn = (position.worker + 1) % self.workers

    def copy(self) -> StreamPosition:
        """Return an independent copy."""
        return StreamPosition.from_plain(self.to_plain())

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"workers": self.workers, "turn": self.turn, "reached": [list(value) for value in self._reached.values()]}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> StreamPosition:
        """Return the position from the result of `to_plain`."""
        position = StreamPosition(plain["workers"])
        position.turn, position._reached = plain["turn"], {position[0]: Position(*position) for position in plain["reached"]}
        return position


class ShardedStream(ResumableLoader):
    """A `DataLoader` over a stream with shards. Rank r of W reads the shards r, r + W, ..., and its workers divide these alike.

    Args:
        loader: The user's loader; see `cadenza.loading.resumable_base.is_sharded_stream`.
        seed: The seed of the run.
        shard: The shard of the rank, which says that the loader is sharded already.
        part: The rank and the number of ranks that divide the shards of the stream.
        replay: Whether to skip batches by reading them.
        pin: Whether workers pin their batches, also without ``pin_memory=True``.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, shard: Shard, part: tuple[int, int], *, replay: bool, pin: bool
    ) -> None:
        self._given, self._seed, self._part = loader, seed, part
        self.shard: Shard = shard
        self._replay, self._pin = replay, loader.pin_memory or (pin and loader.num_workers > 0)
        self._position = StreamPosition(max(loader.num_workers, 1))
        self._restored: StreamPosition | None = None

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if skip and restored is None and not self._replay:
            raise no_position()
        set_loader_epoch(self._given, epoch)
        self._check_shards()
        self._position = StreamPosition(max(self._given.num_workers, 1))
        if skip and restored is not None and not self._replay:
            self._check_workers(restored)
            self._position = restored
        batches = self._read(epoch)
        for batch in islice(batches, skip if self._replay else 0):
            self._position.reach(batch.position)
        if self.shard.world_size > 1:
            batches = self.shard.until_any_ends(batches, ahead=True)
        return self.counted(self._reached(batches))

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._position.to_plain()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = StreamPosition.from_plain(state["stream"]) if "stream" in state else None

    def _reached(self, batches: Iterator[_Placed]) -> Iterator[CountedBatch]:
        """Yield the batches, and move the position: it is that of the batch in use, also if the next one was read ahead."""
        for batch in batches:
            self._position.reach(batch.position)
            yield batch.value

    def _read(self, epoch: int) -> Iterator[_Placed]:
        with isolated_rng(derive_seed(self._seed, epoch)):
            batches = iter(self._loader(epoch))
        yield from read_with_seeds(batches, repeat(0))  # without workers, the data set seeds each batch itself

    def _loader(self, epoch: int) -> DataLoader[Any]:
        """Return a loader for an epoch. Its workers start with the epoch and with the position."""
        given, size = self._given, self._given.batch_size
        seed = (self._seed, epoch, self._part[0])
        options = worker_options(given) | ({} if size is None else {"drop_last": given.drop_last})
        collate: Any = _Collate(given.collate_fn, batched=size is not None)
        return DataLoader(
            _OwnShards(given.dataset, self._part, seed, size or 1, self._position.copy()),
            batch_size=size,
            collate_fn=collate,
            pin_memory=self._pin,
            **options,
        )

    def _check_shards(self) -> None:
        dataset: Any = self._given.dataset
        shards, ranks = len(dataset.shards()), self._part[1]
        if shards < ranks:
            raise DataError(
                f"{type(dataset).__name__}.shards() has {counted(shards, 'shard')} for {counted(ranks, 'rank')}; expected at "
                "least one for each rank. Write more shards, or use fewer ranks."
            )

    def _check_workers(self, restored: StreamPosition) -> None:
        if restored.workers != self._position.workers:
            raise DataError(
                f"the checkpoint lies inside an epoch in which {counted(restored.workers, 'worker')} of each rank read the "
                f"shards, and the loader has {self._position.workers} (num_workers=0 counts as 1). Use the same num_workers, "
                "or continue at a checkpoint from the end of an epoch."
            )
