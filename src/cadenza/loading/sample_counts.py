"""Count the samples of a batch where the loader collates them. The shapes in a batch may mislead, as in a list of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, DataLoader

from cadenza.loading.batches import pinned, size_of
from cadenza.loading.loaders import Limited, length_of


class CountedBatch:
    """A batch from a `DataLoader` with its number of samples; None if the number is unknown."""

    __slots__ = ("batch", "samples")

    def __init__(self, batch: Any, samples: int | None) -> None:
        self.batch: Any = batch
        self.samples: int | None = samples

    def pin_memory(self) -> CountedBatch:
        """Return a copy with the batch in pinned memory. torch calls this."""
        return CountedBatch(pinned(self.batch), self.samples)


class CountingCollate:
    """A ``collate_fn`` that counts the samples it receives."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> CountedBatch:
        return CountedBatch(self.collate(samples), len(samples))


class SampleCounter:
    """Counts the samples of each batch when it is read."""

    samples: int | None = None
    """The number of samples in the last batch; None if it is unknown."""

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each batch, and record its number of samples."""
        for one in batches:
            if type(one) is CountedBatch:
                self.samples = one.samples
                yield one.batch
            else:
                self.samples = None
                yield one

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in the last batch: from the loader or, if it is unknown there, from `batch`."""
        return size_of(batch) if self.samples is None else self.samples


def with_sample_counts(loader: Any) -> Any:
    """Return a loader that yields each batch as a `CountedBatch`; `loader` itself if it is no `DataLoader` of samples.

    The result is a copy with another ``collate_fn``. Each loader has one copy, so that persistent workers are reused.
    """
    if isinstance(loader, Limited):
        return Limited(with_sample_counts(loader.loader), loader.count)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not uses_torch_iteration(loader):
        return loader
    copied = _COPIES.get(loader)
    if copied is None:
        _COPIES[loader] = copied = copy(loader)
        copied._iterator = None
    own = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    vars(copied).update(own, collate_fn=CountingCollate(loader.collate_fn))  # the class rejects assignments to some of them
    return copied


def batch_sizes(loader: Any) -> list[int] | None:
    """Return the number of samples in each batch of an epoch, without reading data; None if that is not known."""
    if isinstance(loader, list | tuple):
        return [size_of(batch) for batch in loader]
    samples = length_of(getattr(loader, "dataset", None))
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler or samples is None:
        return None
    size = loader.batch_sampler.batch_size
    drawn = length_of(loader.sampler)
    whole, rest = divmod(samples if drawn is None else drawn, size)
    return [size] * whole + ([rest] if rest and not loader.drop_last else [])


_COPIES: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def uses_torch_iteration(loader: DataLoader[Any]) -> bool:
    """Return whether the class of a loader uses torch's iteration. The iteration of another class cannot be reproduced."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
