"""Random numbers that depend on the place of a sample in the run alone, not on who loads it, or when.

Everything random about data is drawn from a seed made of (run seed, epoch, batch). So a batch is the same under any number of
workers, after any resume, and after a worker was replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from cadenza.errors import DataError, add_note
from cadenza.loading.batches import announce_epoch
from cadenza.loading.counting import Counted
from cadenza.loading.host_streams import PythonStream
from cadenza.loading.indices import quick_indices
from cadenza.loading.seeding import Streams
from cadenza.loading.shards import Share
from cadenza.status.preemption import spare_this_worker

AHEAD = 1024  # batches whose indices are drawn at a time: a sampler may have no end


def mixed(*parts: int) -> int:
    """Return a seed of 63 bits made of numbers: the mixing function of splitmix64 (Steele et al. 2014), part by part.

    >>> mixed(1, 2, 3) == mixed(1, 2, 3), mixed(1, 2, 3) == mixed(1, 3, 2)
    (True, False)
    """
    value = 0
    for part in parts:
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value >> 1


_MASK = 2**64 - 1


def seed_here(seed: int) -> None:
    """Seed the generators of this process that data code draws from; those of other devices are left alone."""
    PythonStream.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def apart(seed: int) -> Iterator[None]:
    """Inside, data code draws from `seed`; afterwards the generators are as they were, whatever happened."""
    outside = Streams.capture(devices=False)
    try:
        seed_here(seed)
        yield
    finally:
        outside.restore()


class Keyed(NamedTuple):
    """A request to a worker: an index or a batch of indices, the seed for loading, and the epoch."""

    index: Any
    seed: int
    epoch: int = 0


class Fetched(NamedTuple):
    """What came of it, on its way to ``collate_fn``, and the streams to put back when that is done."""

    samples: Any
    seed: int
    streams: Streams | None
    asked: int | None
    """The number of samples in the batch; None if the sampler gives no batches."""


class SeededDataset:
    """A map-style data set whose samples are loaded with the seed that comes with their index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.epoch = dataset, 0

    def __getitem__(self, keyed: Keyed) -> Fetched:
        return self._fetched(keyed, self.dataset.__getitem__, None)

    def __getitems__(self, keyed: Keyed) -> Fetched:
        return self._fetched(keyed, getattr(self.dataset, "__getitems__", None) or self._one_by_one, len(keyed.index))

    def __len__(self) -> int:
        return len(self.dataset)

    def _one_by_one(self, indices: Any) -> list[Any]:
        samples: list[Any] = []
        for index in indices:  # not a comprehension: an error names the sample
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                add_note(error, f"raised by the data set for index {index!r}")
                raise
        return samples

    def _fetched(self, keyed: Keyed, get: Callable[[Any], Any], count: int | None) -> Fetched:
        # In the main process the model draws from the same generators; a worker has no others to keep.
        streams = None if get_worker_info() is not None else Streams.capture(devices=False)
        if keyed.epoch != self.epoch:  # in a persistent worker, its copy of the data set has an earlier epoch
            self.epoch = keyed.epoch
            announce_epoch(self, keyed.epoch)
        try:
            seed_here(keyed.seed)
            return Fetched(get(keyed.index), keyed.seed, streams, count)
        except BaseException as error:
            if streams is not None:
                streams.restore()
            if isinstance(error, StopIteration):
                raise DataError(_would_end("the data set", f" for index {keyed.index!r}")) from error
            raise


class SeededCollate:
    """A ``collate_fn`` that goes on drawing from the batch's seed, and gives each batch with its number of samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: Fetched) -> Counted:
        try:
            return Counted(self.collate(fetched.samples), fetched.asked)
        except StopIteration as error:
            raise DataError(_would_end("collate_fn", "")) from error
        finally:
            if fetched.streams is not None:
                fetched.streams.restore()


def _would_end(what: str, where: str) -> str:
    return (
        f"{what} raised StopIteration{where}, which would silently end the epoch here. Expected a sample or a batch: "
        "look for a next(...) without a default in it."
    )


class SeededStart:
    """A ``worker_init_fn`` that gives the user's own function the user's own data set, and spares it the run's signals."""

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self.start = start

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        spare_this_worker()
        if info is not None:
            own: Any = info.dataset
            object.__setattr__(info, "dataset", own.dataset)  # its own __setattr__ rejects this
        if self.start is not None:
            self.start(worker)


class Order:
    """The indices of an epoch, from any batch on; what a loader takes for its ``batch_sampler`` or ``sampler``.

    Args:
        sampler: The user's own: gives indices, or batches of them, anew at each ``iter``. It is not changed.
        seed: Of the run. What the sampler draws depends on (seed, epoch) alone; if it was given a generator, the generator's
            seed is the one that counts.
        share: The part of it that this rank reads; None: all.
        batched: Whether the sampler gives batches of indices.
    """

    def __init__(self, sampler: Any, seed: int, share: Share | None = None, *, batched: bool = True) -> None:
        self.sampler, self.seed, self._order_seed = sampler, seed, seed
        self.share, self._batched = share or Share(), batched
        self._generator: torch.Generator | None = None
        self.epoch = self.skip = 0
        self.alike_at: int | None = None
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

    def __iter__(self) -> Iterator[Keyed]:
        seed, epoch, skip, share = self.seed, self.epoch, self.skip, self.share
        first = skip if share.ranks == 1 and not share.past else 0
        for batch, index in enumerate(self._own(first), first):
            if batch >= skip:
                # What all do is random alike, too.
                alike = self.alike_at == share.turns_before + batch
                yield Keyed(index, mixed(seed, epoch, share.place(batch) - (share.rank if alike else 0)), epoch)

    def indices(self, epoch: int, share: Share, skip: int) -> list[Any] | None:
        """Return the indices that make batch `skip` of an epoch; None if there are fewer. Nothing of the order is moved."""
        order = copy(self)
        order.epoch, order.share, order.skip = epoch, share, skip
        keyed = next(iter(order), None)
        if keyed is None:
            return None
        return list(keyed.index) if self._batched else [keyed.index]

    def __len__(self) -> int:
        batch_size = getattr(self.sampler, "batch_size", 2) if self._batched else None
        return self.share.length(len(self.sampler), batch_size) or 0

    def _own(self, first: int) -> Iterator[Any]:
        """Yield what this rank reads of it, from its number `first` on."""
        share, drawn = self.share, self._drawn(first)
        self.alike_at = None
        if not share.deals or (share.ranks == 1 and not share.past):
            yield from drawn
        elif not self._batched or not share.even:
            yield from share.of_batches(islice(drawn, share.batches_before, None))
        else:
            yield from share.of_indices(drawn, self._note)

    def _note(self, number: int) -> None:
        self.alike_at = number

    def _drawn(self, skip: int) -> Iterator[Any]:
        """Yield what the sampler gives in this epoch from its number `skip` on."""
        seed = mixed(self._order_seed, self.epoch)
        announce_epoch(self.sampler, self.epoch)  # a copy heard nothing yet
        if self._generator is not None:
            self._generator.manual_seed(seed)
        quick = quick_indices(self.sampler, self._generator, seed, skip, batched=self._batched)
        return islice(self._in_own_streams(seed), skip, None) if quick is None else quick

    def _in_own_streams(self, seed: int) -> Iterator[Any]:
        """Yield what the sampler gives, in streams of its own: the model draws from the same generators."""
        with apart(seed):
            drawn = iter(self.sampler)
            indices = list(islice(drawn, AHEAD))
            inside = Streams.capture(devices=False)
        while indices:
            yield from indices
            outside = Streams.capture(devices=False)
            inside.restore()
            try:
                indices = list(islice(drawn, AHEAD))
                inside = Streams.capture(devices=False)
            finally:
                outside.restore()
