"""Any loader, made resumable: an epoch can be read from any batch on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from cadenza.lazy import imported
from cadenza.loading.batches import CountingCollate, uses_torch_iteration, with_sample_counts
from cadenza.loading.loaders import Limited, end_workers, length_of, set_loader_epoch
from cadenza.loading.resumable_base import (
    Composite,
    LimitedLoader,
    Located,
    ResumableLoader,
    is_sharded_stream,
    no_position,
    read_with_seeds,
)
from cadenza.loading.rng import derive_seed, isolated_rng, seed_host, seeds_below
from cadenza.loading.seeded import MapStyleLoader, SeededWorkerInit
from cadenza.loading.shards import PERMUTED, PositionBatches, Shard, batches_of_rank
from cadenza.loading.tensors import TensorBatches

# -- workers that stay -----------------------------------------------------------------------------


class PersistentWorkers:
    """A `DataLoader` over a stream with ``persistent_workers=True``. Each epoch depends only on its number.

    torch seeds a worker only when it starts. Random numbers in a later epoch then depend on all earlier draws, which no
    checkpoint holds. This class seeds each worker at the start of every epoch, after `worker_init_fn`, and calls ``set_epoch``
    of its copy of the dataset. Attributes that the copy changes are not reset.

    torch seeds the workers of an `IterDataPipe` only in part, so these workers are restarted in each epoch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._given, self._loader, self._epoch = loader, copy(loader), 0
        self.generator: torch.Generator | None = loader.generator
        self._stream: _Stream | None = None
        changed = vars(self._loader)  # the class rejects assignments to these attributes
        changed["_iterator"] = None
        if loader.batch_sampler is not None:
            changed["collate_fn"] = CountingCollate(loader.collate_fn)
        if isinstance(loader.dataset, IterDataPipe):
            changed["persistent_workers"] = False
        else:
            changed["dataset"] = self._stream = _Stream(loader.dataset)
            changed["worker_init_fn"] = SeededWorkerInit(loader.worker_init_fn)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        set_loader_epoch(self._given, epoch)
        self._epoch = epoch

    def close(self) -> None:
        """End the workers."""
        end_workers(self._loader._iterator, persistent=True)

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
            self._stream.begin(int(drawn.item()), self._epoch)
        return iter(self._loader)


class _Stream(IterableDataset[Any]):
    """The dataset in a worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        current = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._current = current.share_memory_()  # seed and epoch, in memory that running workers read

    def begin(self, seed: int, epoch: int) -> None:
        """Send the seed and the epoch of the next pass to the workers."""
        self._current.copy_(torch.tensor([seed, epoch], dtype=torch.int64, device="cpu"))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch = self._current.tolist()
        own = seed + (0 if info is None else info.id)
        if info is not None:
            object.__setattr__(info, "seed", own)  # the class rejects assignments
        seed_host(own)
        set_loader_epoch(self, epoch)
        return iter(self.dataset)


def resumable(
    loader: Iterable[Any],
    seed: int,
    *,
    replay: bool = False,
    shard: Shard | None = None,
    pin: bool = False,
    permuted: int = PERMUTED,
) -> ResumableLoader:
    """Return `loader` in a form that can be resumed at any batch.

    Args:
        loader: A ``DataLoader`` over a map-style dataset with any sampler, `TensorBatches`, a list or tuple of batches, any
            object with ``state_dict`` and ``load_state_dict``, a ``DataLoader`` over a data set with ``shards()`` and
            ``read_shard(shard, start)``, or a `Mixture` of these. Any other iterable can only start at the
            beginning of an epoch.
        seed: The seed of the run. The order of an epoch and all random numbers in its data depend on it and on the epoch alone.
        replay: Skip batches by reading them, for all loaders but the first two.
        shard: The shard that this rank reads; None: everything. Positions and `skip` count the batches of this rank.
        pin: Whether a ``DataLoader`` with workers pins its batches in its own thread, also without ``pin_memory=True``.
        permuted: The largest number of samples in a shuffled epoch with the order of ``torch.randperm``. Above it, each batch
            of indices is computed when it is read (`cadenza.loading.shards.KeyedOrder`).
    """
    if isinstance(loader, Composite):
        return loader.resumable(seed, shard or Shard(), replay=replay, pin=pin, permuted=permuted)
    given, shard = shard or Shard(), (shard or Shard()).for_loader(loader)
    if isinstance(loader, Limited):
        inner = resumable(loader.loader, seed, replay=replay, shard=shard, pin=pin, permuted=permuted)
        return LimitedLoader(inner, shard.limit(loader.count))
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not replay:
        return _Stateful(loader, loader, seed, shard)
    if isinstance(loader, DataLoader) and uses_torch_iteration(loader):
        if not isinstance(loader.dataset, IterableDataset):
            return MapStyleLoader(loader, seed, shard, pin=pin, permuted=permuted)
        if is_sharded_stream(loader):
            part = (given.rank, given.world_size) if given.share_data else (0, 1)
            streams = imported("cadenza.sources.sharded_stream", needed_by=f"{type(loader.dataset).__name__}.shards()")
            stream: ResumableLoader = streams.ShardedStream(loader, seed, shard, part, replay=replay, pin=pin)
            return stream
        if hasattr(loader.dataset, "state_dict") and not loader.num_workers and not replay:
            return _Stateful(with_sample_counts(loader), loader.dataset, seed, shard)
    if isinstance(loader, TensorBatches):
        return _InMemory(loader, seed, shard, permuted)
    if isinstance(loader, list | tuple):
        return _Listed(loader, shard)
    return _Sequential(loader, seed, replay, shard)


def num_batches(loader: object, shard: Shard) -> int | None:
    """Return how many batches a rank gets in one pass over `loader`; None if the loader has no length.

    Args:
        loader: A training or evaluation loader.
        shard: The shard of the rank. `Driver.data_shard` returns it.

    >>> num_batches([1, 2, 3, 4, 5], Shard(rank=0, world_size=1)), num_batches([1, 2, 3, 4, 5], Shard(rank=0, world_size=2))
    (5, 2)
    """
    if isinstance(loader, Composite):
        return loader.num_batches(shard)
    if isinstance(loader, Limited):
        inner = num_batches(loader.loader, shard)
        limit = shard.limit(loader.count)
        return limit if inner is None else min(limit, inner)
    if shard.share_data and shard.world_size > 1 and is_sharded_stream(loader):
        return None  # a length of the data set is that of all ranks
    shard, batches = shard.for_loader(loader), length_of(loader)
    batched = isinstance(loader, DataLoader) and loader.batch_sampler is not None and _is_map_style(loader)
    splits_samples = batched or isinstance(loader, TensorBatches)
    if batches is not None and shard.consumed and shard.even:
        if not splits_samples:
            return shard.consumed_rounds + max(0, batches - shard.consumed_batches) // shard.world_size
        return shard.consumed_rounds + len(batches_of_rank(_positions_of(loader, batches), shard))
    size = getattr(getattr(loader, "batch_sampler", loader), "batch_size", 2) if splits_samples else None
    return shard.length(batches, size)


def _positions_of(loader: Any, batches: int) -> PositionBatches:
    """Return the batches of a loader, with 2 samples in each if its sampler has no batch size."""
    sampler = getattr(loader, "batch_sampler", loader)
    size, samples = getattr(sampler, "batch_size", None), length_of(getattr(sampler, "sampler", None))
    samples = loader.samples if isinstance(loader, TensorBatches) else samples
    if not isinstance(size, int) or samples is None:
        return PositionBatches.of(2 * batches, 2)
    last = samples - size * (batches - 1)
    return PositionBatches.of(size * (batches - 1) + (last if 0 < last < size else size), size)


def _is_map_style(loader: DataLoader[Any]) -> bool:
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return uses_torch_iteration(loader) and not stateful and not isinstance(loader.dataset, IterableDataset)


class _Stateful(ResumableLoader):
    """A loader with a ``state_dict``, or one over a dataset with a ``state_dict``."""

    def __init__(self, loader: Iterable[Any], stateful: Any, seed: int, shard: Shard) -> None:
        self._loader, self._stateful, self._seed, self.shard = loader, stateful, seed, shard
        self._restored: Mapping[str, Any] | None = None

    @property
    def obstacle(self) -> str | None:
        if not _has_shuffle_buffer(getattr(self._stateful, "dataset", self._stateful)):
            return None
        return (
            "the state of a streamed dataset does not contain the samples in its shuffle buffer, which would be lost. Shuffle "
            "without a buffer (only the shards, or a map-style dataset), or read and discard the batches with "
            "fit(resume=..., replay=True)."
        )

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        if skip and self._restored is None:
            raise no_position()
        self.check_inside(skip)
        set_loader_epoch(self._loader, epoch)
        if not skip:  # the saved position is the end of the previous epoch
            self._restored = None
        shard, own = self.shard.at_round(skip)
        return self.counted(self._read(_seeded(self._loader, self._seed, epoch, own, shard)))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. The loader gets its state with the first: without one, its next pass would continue there."""
        if self._restored is not None:
            self._stateful.load_state_dict(self._restored["loader"])
            self._restored = None
        yield from batches

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._stateful.state_dict() if self._restored is None else self._restored["loader"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state if "loader" in state else None


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a Hugging Face dataset is shuffled with a buffer. There is no public attribute for it."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


class _Listed(ResumableLoader):
    """A list or tuple of batches."""

    def __init__(self, batches: Sequence[Any], shard: Shard) -> None:
        self._batches, self.shard = batches, shard

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        set_loader_epoch(self._batches, epoch)
        shard, own = self.shard.at_round(skip)
        if not shard.share_data:
            return shard.until_any_ends(islice(self._batches, own, None), len(self._batches) - own)
        positions = batches_of_rank(PositionBatches.of(len(self._batches), 1), shard, splits=False)
        return (self._batches[item.start] for item in positions.since(own))

    def located(self, epoch: int, number: int) -> list[Located]:
        """Return the index of the batch in the list."""
        shard, own = self.shard.at_round(number)
        index: int | None = own
        if shard.share_data:
            positions = batches_of_rank(PositionBatches.of(len(self._batches), 1), shard, splits=False)
            index = next((item.start for item in positions.since(own)), None)
        return [Located("", epoch, number, None if index is None else [index])]


class _InMemory(ResumableLoader):
    """`TensorBatches`, which can be read at any index."""

    def __init__(self, loader: TensorBatches[Any], seed: int, shard: Shard, permuted: int) -> None:
        self._loader, self._seed, self.shard, self._permuted = loader, seed, shard, permuted
        self._replicated_at: int | None = None

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        self._replicated_at = None
        return self._loader.batches(
            epoch, skip, seed=self._seed, shard=self.shard, on_replicated=self._on_replicated, permuted=self._permuted
        )

    def _on_replicated(self, number: int) -> None:
        self._replicated_at = number

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        return self._loader.indices(epoch, number, seed=self._seed, shard=self.shard, permuted=self._permuted)

    @property
    def replicated_at(self) -> int | None:
        return self._replicated_at


class _Sequential(ResumableLoader):
    """Any iterable: it starts at the beginning of an epoch."""

    def __init__(self, loader: Iterable[Any], seed: int, replay: bool, shard: Shard) -> None:
        self._loader, self._seed, self._replay, self.shard = loader, seed, replay, shard
        self._read = with_sample_counts(loader)
        if isinstance(loader, DataLoader) and uses_torch_iteration(loader) and isinstance(loader.dataset, IterableDataset):
            self._read = PersistentWorkers(loader) if loader.persistent_workers else self._read

    @property
    def obstacle(self) -> str | None:
        if self._replay:
            return None
        streams = isinstance(self._loader, DataLoader) and isinstance(self._loader.dataset, IterableDataset)
        return (
            f"a {type(self._loader).__name__}{' over an IterableDataset' if streams else ''} can only start at the beginning "
            "of an epoch. Use a DataLoader over a map-style dataset, or a loader with state_dict and load_state_dict "
            "(torchdata's StatefulDataLoader), or read and discard the batches with fit(resume=..., replay=True)."
        )

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        set_loader_epoch(self._read, epoch)
        self.check_inside(skip)
        shard, own = self.shard.at_round(skip)
        ahead = isinstance(self._loader, DataLoader) and self._loader.num_workers > 0  # which read ahead anyway
        batches = _seeded(self._read, self._seed, epoch, 0, shard, consumed=shard.consumed_batches, ahead=ahead)
        for _ in range(own):
            next(batches, None)
        return self.counted(batches)

    def close(self) -> None:
        if isinstance(self._read, PersistentWorkers):
            self._read.close()


def _seeded(
    loader: Iterable[Any], seed: int, epoch: int, skip: int, shard: Shard, *, consumed: int = 0, ahead: bool = False
) -> Iterator[Any]:
    """Yield the batches of this rank from its number `skip` on. The random numbers of each batch depend on its index alone.

    `loader` stands at the next batch, except for `consumed` batches of other world sizes, which must still be read.
    """
    # Every rank reads all batches of a loader that Cadenza shards, and keeps its own.
    first = shard.consumed_batches - consumed + skip * shard.world_size if shard.share_data else skip
    index_of = int if shard.share_data else shard.global_index
    batches = _with_seeds(loader, seed, epoch, count(first), index_of)
    return shard.shard_batches(islice(batches, consumed, None), ahead=ahead)


def _with_seeds(
    loader: Iterable[Any], seed: int, epoch: int, numbers: Iterable[int], index_of: Callable[[int], int]
) -> Iterator[Any]:
    """Yield the batches of `loader`. Each is read with the seed for its index in the epoch."""
    holders = (loader, getattr(loader, "sampler", None))
    generators = {g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    given = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(derive_seed(generator.initial_seed(), epoch))
        with isolated_rng(derive_seed(seed, epoch)):
            batches = iter(loader)
        yield from read_with_seeds(batches, map(seeds_below(seed, epoch), map(index_of, numbers)))
    finally:
        for generator, state in given:  # the next epoch and the next run must start from the user's seed as well
            generator.set_state(state)
