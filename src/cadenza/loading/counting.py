"""Count the samples of a batch in the loader. The size of the batch may be misleading, as in a list of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from cadenza.loading.batches import Limited, pinned, size_of


class Counted:
    """A batch from a `DataLoader` with its number of samples; None if the number is unknown."""

    __slots__ = ("batch", "samples")

    def __init__(self, batch: Any, samples: int | None) -> None:
        self.batch, self.samples = batch, samples

    def pin_memory(self) -> Counted:
        """Return the same with the batch in pinned memory. torch calls this."""
        return Counted(pinned(self.batch), self.samples)


class Counting:
    """A ``collate_fn`` that counts the samples it receives."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Counted:
        return Counted(self.collate(samples), len(samples))


class Counts:
    """Counts the samples of each batch when it is read."""

    samples: int | None = None
    """The number of samples in the last batch; None if the loader does not know it."""

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each batch, and record its number of samples."""
        for one in batches:
            if type(one) is Counted:
                self.samples = one.samples
                yield one.batch
            else:
                self.samples = None
                yield one

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in the last batch: from the loader or, if it does not know, from `batch`."""
        return size_of(batch) if self.samples is None else self.samples


def counting(loader: Any) -> Any:
    """Return a loader that gives each batch as a `Counted`; `loader` itself if it is no `DataLoader` of samples.

    The result is a copy with another ``collate_fn``. Each loader has one copy, so that persistent workers stay.
    """
    if isinstance(loader, Limited):
        return Limited(counting(loader.loader), loader.count)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not reads_as_torch_does(loader):
        return loader
    copied = _COPIES.get(loader)
    if copied is None:
        _COPIES[loader] = copied = copy(loader)
        copied._iterator = None
    own = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    vars(copied).update(own, collate_fn=Counting(loader.collate_fn))  # __setattr__ rejects some of them
    return copied


_COPIES: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def reads_as_torch_does(loader: DataLoader[Any]) -> bool:
    """Return whether the class of a loader uses torch's iteration. The iteration of another class cannot be reproduced."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
