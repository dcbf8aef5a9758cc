"""Random numbers in data that depend on the index of a batch alone, not on the worker that loads it, or when.

Everything random in the data is drawn from a seed that is derived from (run seed, epoch, batch). A batch is therefore the same
with any number of workers, after a resume, and after a worker was replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from cadenza.errors import DataError, add_note
from cadenza.loading.batches import CountedBatch
from cadenza.loading.loaders import end_workers, is_worker_death, length_of, set_loader_epoch, started
from cadenza.loading.resumable_base import ResumableLoader
from cadenza.loading.rng import RNGState, derive_seed, isolated_rng, seed_host, seeds_below
from cadenza.loading.shards import PERMUTED, KeyedOrder, Order, Permutation, PositionBatches, Shard, Unshuffled, batches_of_rank
from cadenza.status.signals import end_of_process, spare_this_worker

logger: logging.Logger = logging.getLogger("cadenza")

# -- indices ---------------------------------------------------------------------------------------


def known_epoch(
    sampler: Any, generator: torch.Generator | None, seed: int, *, permuted: int = PERMUTED, batched: bool
) -> tuple[PositionBatches, Order] | None:
    """Return the batches of positions and the order of the samples in an epoch of a sampler; None for an unknown sampler.

    Known are `SequentialSampler`, and `RandomSampler` without replacement, alone or in a `BatchSampler`, but no subclasses.

    Args:
        sampler: The user's sampler.
        generator: The seeded generator of the sampler. None: the sampler draws a seed from torch's global generator.
        seed: The seed of torch's global generator, for a sampler that draws from it, and the key of a `KeyedOrder`.
        permuted: The largest number of samples with the sampler's own order. More samples get a `KeyedOrder`.
        batched: Whether the sampler yields batches of indices. Without it, each index is a batch.
    """
    if batched and type(sampler) is not BatchSampler:
        return None
    inner: Any = sampler.sampler if batched else sampler
    shuffled = type(inner) is RandomSampler and not inner.replacement and inner.num_samples == len(inner.data_source)
    if not shuffled and type(inner) is not SequentialSampler:
        return None
    samples, size = len(inner), sampler.batch_size if batched else 1
    dropped = samples % size if batched and sampler.drop_last else 0
    batches = PositionBatches.of(samples - dropped, size)
    if not shuffled:
        return batches, Unshuffled()
    if samples > permuted:
        return batches, KeyedOrder(samples, seed)
    if generator is None:  # as `RandomSampler.__iter__` does
        drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(int(drawn.item()))
    return batches, Permutation(samples, generator)


AHEAD = 1024  # batches of indices that are drawn at a time, because a sampler may be endless


class SeededIndex(NamedTuple):
    """A request to a worker: an index or a batch of indices, the seed for loading, and the epoch."""

    index: Any
    seed: int
    epoch: int = 0


class SeededSamples(NamedTuple):
    """Loaded samples on their way to ``collate_fn``, and the RNG state to restore after it."""

    samples: Any
    seed: int
    rng_state: RNGState | None
    size: int | None
    """The number of samples in the batch; None if the sampler yields no batches."""


class SeededDataset:
    """A map-style dataset that loads samples with the seed that comes with their index.

    Args:
        dataset: The user's dataset.
        draws: Whether random numbers may be drawn while samples are loaded and collated.
    """

    def __init__(self, dataset: Any, *, draws: bool = True) -> None:
        self.dataset: Any = dataset
        self.epoch: int = 0
        self._draws = draws

    def __getitem__(self, request: SeededIndex) -> SeededSamples:
        return self._load(request, self.dataset.__getitem__, None)

    def __getitems__(self, request: SeededIndex) -> SeededSamples:
        return self._load(request, getattr(self.dataset, "__getitems__", None) or self._one_by_one, len(request.index))

    def __len__(self) -> int:
        return len(self.dataset)

    def _one_by_one(self, indices: Any) -> list[Any]:
        samples: list[Any] = []
        for index in indices:  # not a comprehension: an error names the index
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                add_note(error, f"raised by the data set for index {index!r}")
                raise
        return samples

    def _load(self, request: SeededIndex, get: Callable[[Any], Any], count: int | None) -> SeededSamples:
        if request.epoch != self.epoch:  # in a persistent worker, the copy of the dataset has an earlier epoch
            self.epoch = request.epoch
            set_loader_epoch(self, request.epoch)
        rng_state = None
        if self._draws and get_worker_info() is None:  # the model draws from the same generators
            rng_state = RNGState.exchange(request.seed)
        elif self._draws:
            seed_host(request.seed)
        try:
            return SeededSamples(get(request.index), request.seed, rng_state, count)
        except BaseException as error:
            if rng_state is not None:
                rng_state.restore()
            if isinstance(error, StopIteration):
                raise DataError(_would_end("the data set", f" for index {request.index!r}")) from error
            raise


def may_draw(dataset: Any, collate: Any) -> bool:
    """Return whether loading may draw random numbers. Only code of torch that indexes and stacks tensors is known not to.

    >>> data = TensorDataset(torch.zeros(3))
    >>> may_draw(Subset(data, [0]), default_collate), may_draw(data, lambda samples: samples)
    (False, True)
    """
    if type(dataset) is Subset:
        return may_draw(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return any(may_draw(part, collate) for part in dataset.datasets)
    plain = type(dataset) is TensorDataset and all(type(tensor) is Tensor for tensor in dataset.tensors)
    return not plain or collate is not default_collate


class SeededCollate:
    """A ``collate_fn`` that continues to draw from the seed of the batch, and returns the batch with its number of samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, loaded: SeededSamples) -> CountedBatch:
        try:
            return CountedBatch(self.collate(loaded.samples), loaded.size)
        except StopIteration as error:
            raise DataError(_would_end("collate_fn", "")) from error
        finally:
            if loaded.rng_state is not None:
                loaded.rng_state.restore()


def _would_end(what: str, where: str) -> str:
    return (
        f"{what} raised StopIteration{where}, which would silently end the epoch here. Expected a sample or a batch: "
        "look for a next(...) without a default in it."
    )


class SeededWorkerInit:
    """A ``worker_init_fn`` that shows the user's function the user's dataset, and keeps the run's signals from the worker."""

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self.start = start
        self._parent_ends = end_of_process()

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        spare_this_worker(self._parent_ends)
        if info is not None:
            own: Any = info.dataset
            object.__setattr__(info, "dataset", own.dataset)  # the class rejects assignments
        if self.start is not None:
            self.start(worker)


def worker_options(given: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a user's loader for its workers. To start them draws nothing from the generator of the model."""
    options: dict[str, Any] = {"num_workers": given.num_workers, "timeout": given.timeout, "generator": torch.Generator()}
    if given.num_workers:
        options |= {"prefetch_factor": given.prefetch_factor, "multiprocessing_context": given.multiprocessing_context}
        options["worker_init_fn"] = SeededWorkerInit(given.worker_init_fn)
    return options


class ResumableSampler:
    """The indices of an epoch from any batch on: a ``batch_sampler`` or ``sampler`` for a `DataLoader`.

    Args:
        sampler: The user's sampler, which yields indices or batches of them at each ``iter``. It is not changed.
        seed: The seed of the run. The order depends on (seed, epoch) alone. If the sampler has a generator, the seed of that
            generator is used instead.
        shard: The shard that this rank reads; None: everything.
        batched: Whether the sampler yields batches of indices.
        permuted: See `resumable`.
    """

    def __init__(
        self, sampler: Any, seed: int, shard: Shard | None = None, *, batched: bool = True, permuted: int = PERMUTED
    ) -> None:
        self.sampler: Any = sampler
        self.seed: int = seed
        self._order_seed = seed
        self.shard: Shard = shard or Shard()
        self._batched, self._permuted = batched, permuted
        self._generator: torch.Generator | None = None
        self.epoch = self.skip = 0
        self.replicated_at: int | None = None
        """The number in the epoch of a batch that is the same on all ranks, once it is drawn."""
        inner = getattr(sampler, "sampler", sampler)
        given = getattr(inner, "generator", None)
        if isinstance(given, torch.Generator):
            self._order_seed, self._generator = given.initial_seed(), torch.Generator()
            copied = copy(inner)
            copied.generator = self._generator
            self.sampler = copied if inner is sampler else copy(sampler)
            if inner is not sampler:
                self.sampler.sampler = copied

    def __iter__(self) -> Iterator[SeededIndex]:
        epoch, skip, shard = self.epoch, self.skip, self.shard
        seed_of = seeds_below(self.seed, epoch)
        for batch, index in enumerate(self._read(skip), skip):
            # A batch that all ranks train on has the same random numbers on all of them.
            replicated = self.replicated_at == shard.consumed_rounds + batch
            global_index = shard.global_index(batch) - (shard.rank if replicated else 0)
            yield SeededIndex(index, seed_of(global_index), epoch)

    def indices(self, epoch: int, shard: Shard, skip: int) -> list[Any] | None:
        """Return the indices in batch `skip` of an epoch; None if there are fewer batches. The position does not change."""
        sampler = copy(self)
        sampler.epoch, sampler.shard, sampler.skip = epoch, shard, skip
        request = next(iter(sampler), None)
        if request is None:
            return None
        return list(request.index) if self._batched else [request.index]

    def __len__(self) -> int:
        batch_size = getattr(self.sampler, "batch_size", 2) if self._batched else None
        return self.shard.length(len(self.sampler), batch_size) or 0

    def _read(self, skip: int) -> Iterator[Any]:
        """Return the items of this rank's shard, from number `skip` on."""
        seed = derive_seed(self._order_seed, self.epoch)
        set_loader_epoch(self.sampler, self.epoch)  # a copy of the sampler has not received it yet
        if self._generator is not None:
            self._generator.manual_seed(seed)
        known = known_epoch(self.sampler, self._generator, seed, permuted=self._permuted, batched=self._batched)
        self.replicated_at = None
        if known is None:
            return islice(self._sharded(self._iterated(seed)), skip, None)
        batches, order = known
        own = batches_of_rank(batches, self.shard, splits=self._batched)
        self.replicated_at = own.replicated_at
        indices = order.read(own.since(skip))
        return (index.tolist() for index in indices) if self._batched else (int(index) for index in indices)

    def _sharded(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """Return the items of this rank's shard from those of the whole sampler."""
        shard = self.shard
        if not shard.share_data or (shard.world_size == 1 and not shard.consumed):
            return drawn
        if not self._batched or not shard.even:
            return shard.shard_batches(islice(drawn, shard.consumed_batches, None))
        return shard.shard_indices(drawn, self._on_replicated)

    def _on_replicated(self, number: int) -> None:
        self.replicated_at = number

    def _iterated(self, seed: int) -> Iterator[Any]:
        """Iterate the user's sampler with an RNG state of its own, because the model draws from the same generators."""
        with isolated_rng(seed):
            drawn = iter(self.sampler)
            indices = list(islice(drawn, AHEAD))
            inside = RNGState.capture(devices=False)
        while indices:
            yield from indices
            outside = RNGState.capture(devices=False)
            inside.restore()
            try:
                indices = list(islice(drawn, AHEAD))
                inside = RNGState.capture(devices=False)
            finally:
                outside.restore()


# -- the loader ------------------------------------------------------------------------------------

MAX_DEATHS = 5  # workers that may die in one epoch before the error is raised


class MapStyleLoader(ResumableLoader):
    """A DataLoader over a map-style dataset. Skipped batches are not loaded, and workers that die are replaced."""

    def __init__(self, loader: DataLoader[Any], seed: int, shard: Shard, *, pin: bool, permuted: int) -> None:
        self._given = loader
        self.shard: Shard = shard
        self._pins = pin and loader.num_workers > 0 and not loader.pin_memory
        batched = loader.batch_sampler is not None
        sampler = loader.batch_sampler if batched else loader.sampler
        self._sampler = ResumableSampler(sampler, seed, shard, batched=batched, permuted=permuted)
        self._dataset = SeededDataset(loader.dataset, draws=may_draw(loader.dataset, loader.collate_fn))
        self._loader = self._build()

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        set_loader_epoch(self._given, epoch)
        sampler, self._dataset.epoch = self._sampler, epoch
        sampler.epoch, (sampler.shard, sampler.skip) = epoch, self.shard.at_round(skip)
        batches = self._restarting() if self._given.num_workers else iter(self._loader)
        batches = self.counted(batches)
        if self.shard.world_size == 1:
            return batches
        length = None if self.shard.share_data else length_of(self._given)
        return self.shard.until_any_ends(batches, None if length is None else length - sampler.skip)

    @property
    def replicated_at(self) -> int | None:
        return self._sampler.replicated_at

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        shard, skip = self.shard.at_round(number)
        drawn = [self._sampler.indices(epoch, shard, skip) for _ in range(2)]
        return drawn[0] if drawn[0] == drawn[1] else None  # a sampler with a state of its own gives another order each time

    def _build(self) -> DataLoader[Any]:
        given = self._given
        collate = SeededCollate(given.collate_fn)
        batched, sampler = given.batch_sampler is not None, self._sampler
        options = worker_options(given) | ({"batch_sampler": sampler} if batched else {"batch_size": None, "sampler": sampler})
        if given.num_workers:
            options |= {"persistent_workers": given.persistent_workers, "in_order": given.in_order}
        return DataLoader(
            cast("Dataset[Any]", self._dataset),
            collate_fn=cast("Callable[[list[Any]], Any]", collate),
            pin_memory=given.pin_memory or self._pins,
            **options,
        )

    def _restarting(self) -> Iterator[Any]:
        """Yield the batches of an epoch. When a worker dies, start new workers at the next batch."""
        deaths, batches = 0, started(self._loader)
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except (RuntimeError, EOFError, OSError) as error:
                    deaths += 1
                    if not is_worker_death(error, batches) or deaths > MAX_DEATHS:
                        raise
                    number = self._sampler.skip + 1
                    logger.warning("a loader worker died (%s); restarting the workers at batch %d", error, number)
                    self._loader = self._build()
                    batches = started(self._loader)
                    continue
                self._sampler.skip += 1  # the batch at which new workers start
                yield batch
        finally:
            end_workers(batches)

    def close(self) -> None:
        end_workers(self._loader._iterator, persistent=True)
