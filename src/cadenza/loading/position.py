"""Loaders with a position: an epoch can be read from any batch on."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from cadenza.errors import DataError
from cadenza.loading.batches import Limited, announce_epoch, length_of
from cadenza.loading.counting import Counts, counting, reads_as_torch_does
from cadenza.loading.seeded import Order, SeededCollate, SeededDataset, SeededStart, apart, mixed
from cadenza.loading.shards import Share
from cadenza.loading.staying import StayingWorkers, workers_stay
from cadenza.loading.tensors import TensorBatches

MAX_DEATHS = 5  # workers that may die in an epoch before it is given up

logger = logging.getLogger("cadenza")


class Positioned(Counts, ABC):
    """A training loader as the loop reads it."""

    share = Share()
    """The part of it that this rank reads."""

    @property
    def alike_at(self) -> int | None:
        """The number in the epoch, from 0, of a batch that is the same on all ranks, as fewer samples are left than ranks."""
        return None

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        """Return the indices in the data set of the samples in a batch, from 0; None if the loader does not know them."""
        return None

    @abstractmethod
    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return the batches of an epoch from number `skip` on; those before may have been read by another number of ranks.

        Raises:
            DataError: `skip` is not 0, and this loader cannot be positioned.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides epoch and batch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # most need no more than epoch and batch
        """Take back what `state_dict` returned; the next `batches` continue there."""


def positioned(
    loader: Iterable[Any], seed: int, *, replay: bool = False, share: Share | None = None, pin: bool = False
) -> Positioned:
    """Return `loader` with a position.

    Args:
        loader: A ``DataLoader`` over a map-style data set with any sampler, `TensorBatches`, a list or tuple of batches,
            anything that offers ``state_dict`` and ``load_state_dict``, or any other iterable, which can only start at the
            beginning.
        seed: Of the run: the order of an epoch and all that is random in its data depend on it and on the epoch alone.
        replay: Skip by reading, for all but the first two.
        share: The part of it that this rank reads; None: all. Position and `skip` count this rank's batches.
        pin: Have a ``DataLoader`` with workers pin its batches in a thread of its own, also if it was not told to.
    """
    share = (share or Share()).of(loader)
    if isinstance(loader, Limited):
        return _First(positioned(loader.loader, seed, replay=replay, share=share, pin=pin), share.own(loader.count))
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not replay:
        return _Stateful(loader, loader, seed, share)
    if isinstance(loader, DataLoader) and reads_as_torch_does(loader):
        if not isinstance(loader.dataset, IterableDataset):
            return _MapStyle(loader, seed, share, pin=pin)
        if hasattr(loader.dataset, "state_dict") and not loader.num_workers and not replay:
            return _Stateful(counting(loader), loader.dataset, seed, share)
    if isinstance(loader, TensorBatches):
        return _InMemory(loader, seed, share)
    if isinstance(loader, list | tuple):
        return _Listed(loader, share)
    return _Plain(loader, seed, replay, share)


def batches_in(loader: object, share: Share) -> int | None:
    """Return how many batches of one pass over `loader` a rank gets; None if the loader does not say."""
    if isinstance(loader, Limited):
        inner = batches_in(loader.loader, share)
        count = share.own(loader.count)
        return count if inner is None else min(count, inner)
    share, batches = share.of(loader), length_of(loader)
    batched = isinstance(loader, DataLoader) and loader.batch_sampler is not None and _is_map_style(loader)
    deals_samples = batched or isinstance(loader, TensorBatches)
    if batches is not None and share.past and share.even:
        if not deals_samples:
            return share.turns_before + max(0, batches - share.batches_before) // share.ranks
        return share.turns_before + sum(1 for _ in share.turns(map(range, _sizes(loader, batches))))
    size = getattr(getattr(loader, "batch_sampler", loader), "batch_size", 2) if deals_samples else None
    return share.length(batches, size)


def _sizes(loader: Any, batches: int) -> list[int]:
    """Return how many samples each batch of a loader has: 2, if its sampler does not say."""
    sampler = getattr(loader, "batch_sampler", loader)
    size, samples = getattr(sampler, "batch_size", None), length_of(getattr(sampler, "sampler", None))
    samples = loader.samples if isinstance(loader, TensorBatches) else samples
    if not isinstance(size, int) or samples is None:
        return [2] * batches
    last = samples - size * (batches - 1)
    return [size] * (batches - 1) + [last if 0 < last < size else size]


def _is_map_style(loader: DataLoader[Any]) -> bool:
    knows = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return reads_as_torch_does(loader) and not knows and not isinstance(loader.dataset, IterableDataset)


class _MapStyle(Positioned):
    """A DataLoader over samples with an index: skipping loads nothing, and a worker that died is replaced."""

    def __init__(self, loader: DataLoader[Any], seed: int, share: Share, *, pin: bool) -> None:
        self._given, self.share = loader, share
        self._pins = pin and loader.num_workers > 0 and not loader.pin_memory
        batched = loader.batch_sampler is not None
        self._order = Order(loader.batch_sampler if batched else loader.sampler, seed, share, batched=batched)
        self._dataset = SeededDataset(loader.dataset)
        self._loader = self._made()

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        announce_epoch(self._given, epoch)
        order, self._dataset.epoch = self._order, epoch
        order.epoch, (order.share, order.skip) = epoch, self.share.at(skip)
        batches = self._guarded() if self._given.num_workers else iter(self._loader)
        batches = self.counted(batches)
        return batches if self.share.ranks == 1 else self.share.together(batches)

    @property
    def alike_at(self) -> int | None:
        return self._order.alike_at

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        share, skip = self.share.at(number)
        drawn = [self._order.indices(epoch, share, skip) for _ in range(2)]
        return drawn[0] if drawn[0] == drawn[1] else None  # a sampler with a memory of its own tells no second time

    def _made(self) -> DataLoader[Any]:
        given = self._given
        collate = SeededCollate(given.collate_fn)
        batched = given.batch_sampler is not None
        options: dict[str, Any] = {"batch_sampler": self._order} if batched else {"batch_size": None, "sampler": self._order}
        if given.num_workers:
            options |= {"prefetch_factor": given.prefetch_factor, "persistent_workers": given.persistent_workers}
            options |= {"multiprocessing_context": given.multiprocessing_context, "in_order": given.in_order}
        return DataLoader(
            cast("Dataset[Any]", self._dataset),
            collate_fn=cast("Callable[[list[Any]], Any]", collate),
            num_workers=given.num_workers,
            pin_memory=given.pin_memory or self._pins,
            timeout=given.timeout,
            worker_init_fn=SeededStart(given.worker_init_fn),
            generator=torch.Generator(),  # its own: starting workers draws nothing from the model's stream
            **options,
        )

    def _guarded(self) -> Iterator[Any]:
        """Yield the batches of an epoch; when a worker dies, start new workers at the batch that is due."""
        deaths, batches = 0, _started(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:
                deaths += 1
                if not _is_of_a_death(error, batches) or deaths > MAX_DEATHS:
                    raise
                logger.warning("a loader worker died (%s); starting again at batch %d", error, self._order.skip + 1)
                self._loader = self._made()
                batches = _started(self._loader)
                continue
            self._order.skip += 1  # should a worker die, this is where to go on
            yield batch


def _is_of_a_death(error: Exception, batches: Any) -> bool:
    """Return whether an error in reading a batch comes of the death of a worker; a batch may have been on its way."""
    if str(error).startswith("DataLoader worker (pid"):
        return True
    if "in DataLoader worker process" in str(error):  # raised by the data set
        return False
    workers = getattr(batches, "_workers", ())
    for worker in workers:
        worker.join(0.1 / len(workers))  # one that was killed this moment is still seen alive
    return any(not worker.is_alive() for worker in workers)


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the loader's iterator, and leave the death of a worker to its ``next``, which notices within 5 seconds.

    torch's handler of SIGCHLD raises in whatever line the main thread is in, also inside an optimizer step or a save, if one of
    the workers that it was told of died. It may be there already, for a loader of the user's.
    """
    batches = iter(loader)
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]  # there is no public way
        batches._worker_pids_set = False  # type: ignore[attr-defined]  # or it would remove them again at its end
    return batches


class _Stateful(Positioned):
    """A loader, or the data set in it, that knows its own position."""

    def __init__(self, loader: Iterable[Any], keeper: Any, seed: int, share: Share) -> None:
        self._loader, self._keeper, self._seed, self.share = loader, keeper, seed, share
        self._restored: Mapping[str, Any] | None = None

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if skip and restored is None:
            raise DataError("the checkpoint holds no position for this loader; it was saved with another kind of loader")
        if skip and _has_shuffle_buffer(getattr(self._keeper, "dataset", self._keeper)):
            raise DataError(
                f"the run must continue at batch {skip + 1} of an epoch, and the state of a streamed data set does not hold "
                "the samples in its shuffle buffer: they would be lost. Shuffle without a buffer (the shards, or a data set "
                "with indices), or have the batches read and dropped with fit(resume=..., replay=True)."
            )
        announce_epoch(self._loader, epoch)
        if skip and restored is not None:  # at the start of an epoch its position is the end of the last one
            self._keeper.load_state_dict(restored["loader"])
        share, own = self.share.at(skip)
        return self.counted(_seeded(self._loader, self._seed, epoch, own, share))

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state if "loader" in state else None


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a Hugging Face data set was shuffled with a buffer, which it does not say in public."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


class _Listed(Positioned):
    """Batches in a list."""

    def __init__(self, batches: Sequence[Any], share: Share) -> None:
        self._batches, self.share = batches, share

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        announce_epoch(self._batches, epoch)
        share, own = self.share.at(skip)
        batches = islice(self._batches, share.batches_before, None)
        return islice(batches if share.ranks == 1 else share.of_batches(batches), own, None)


class _InMemory(Positioned):
    """Tensors, of which any part of any epoch can be had."""

    def __init__(self, loader: TensorBatches[Any], seed: int, share: Share) -> None:
        self._loader, self._seed, self.share = loader, seed, share
        self._alike_at: int | None = None

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        self._alike_at = None
        return self._loader.batches(epoch, skip, seed=self._seed, share=self.share, alike=self._note)

    def _note(self, number: int) -> None:
        self._alike_at = number

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        return self._loader.indices(epoch, number, seed=self._seed, share=self.share)

    @property
    def alike_at(self) -> int | None:
        return self._alike_at


class _Plain(Positioned):
    """Any iterable: it starts at the beginning."""

    def __init__(self, loader: Iterable[Any], seed: int, replay: bool, share: Share) -> None:
        self._loader, self._seed, self._replay, self.share = loader, seed, replay, share
        self._read = counting(loader)
        if isinstance(loader, DataLoader) and reads_as_torch_does(loader) and workers_stay(loader):
            self._read = StayingWorkers(loader)

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        announce_epoch(self._read, epoch)
        if skip and not self._replay:
            raise DataError(
                f"the run must continue at batch {skip + 1} of an epoch, and a {type(self._loader).__name__} cannot be "
                "positioned there. Use a DataLoader over a data set with indices, or a loader with state_dict and "
                "load_state_dict (torchdata's StatefulDataLoader); or have the batches read and dropped with "
                "fit(resume=..., replay=True)."
            )
        share, own = self.share.at(skip)
        batches = _seeded(self._read, self._seed, epoch, 0, share, drop=share.batches_before)
        for _ in range(own):
            next(batches, None)
        return self.counted(batches)


def _seeded(loader: Iterable[Any], seed: int, epoch: int, skip: int, share: Share, *, drop: int = 0) -> Iterator[Any]:
    """Yield this rank's batches, from its number `skip` on, each in streams that depend on its place alone.

    The loader is at what comes next, but for `drop` batches that others did, which are still to be read.
    """
    # What is to be shared out is read by every rank, each keeping its own.
    first, place = (share.batches_before - drop + skip * share.ranks, int) if share.deals else (skip, share.place)
    return share.of_batches(islice(_in_own_streams(loader, seed, epoch, count(first), place), drop, None))


def _in_own_streams(
    loader: Iterable[Any], seed: int, epoch: int, numbers: Iterable[int], place: Callable[[int], int]
) -> Iterator[Any]:
    holders = (loader, getattr(loader, "sampler", None))
    generators = {g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    given = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(mixed(generator.initial_seed(), epoch))
        with apart(mixed(seed, epoch)):
            batches = iter(loader)
        for number in numbers:
            with apart(mixed(seed, epoch, place(number))):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
    finally:
        for generator, state in given:  # the next epoch, and the next run, start from the user's seed as well
            generator.set_state(state)


_END: Any = object()


class _First(Positioned):
    """The first batches of each epoch; see `Limited`."""

    def __init__(self, inner: Positioned, count: int) -> None:
        self._inner, self._count, self.share = inner, count, inner.share

    @property
    def alike_at(self) -> int | None:
        return self._inner.alike_at

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        return iter(Limited(_Once(lambda: self._inner.batches(epoch, skip)), self._count - skip))

    def size_of(self, batch: Any) -> int:
        return self._inner.size_of(batch)

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        return self._inner.indices(epoch, number)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


class _Once:
    """An iterable made by a function."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()
