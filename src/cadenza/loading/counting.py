"""How many samples a batch has, as the loader knows it: what a batch itself says may be wrong, as in a list of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from cadenza.batching import Limited, pinned, size_of


class Counted:
    """A batch and its number of samples, on their way out of a `DataLoader`; None if the number is not known."""

    __slots__ = ("batch", "samples")

    def __init__(self, batch: Any, samples: int | None) -> None:
        self.batch, self.samples = batch, samples

    def pin_memory(self) -> Counted:
        """Return it with the batch in pinned memory; for torch."""
        return Counted(pinned(self.batch), self.samples)


class Counting:
    """A ``collate_fn`` that notes how many samples it is given."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Counted:
        return Counted(self.collate(samples), len(samples))


class Counts:
    """Batches of which each one is counted when it is read."""

    samples: int | None = None
    """How many samples the last batch has; None if the loader does not know."""

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each batch, and note its number of samples."""
        for one in batches:
            if type(one) is Counted:
                self.samples = one.samples
                yield one.batch
            else:
                self.samples = None
                yield one

    def size_of(self, batch: Any) -> int:
        """Return how many samples the last batch has: as the loader knows or, if it does not, as `batch` says."""
        return size_of(batch) if self.samples is None else self.samples


def counting(loader: Any) -> Any:
    """Return a loader that gives the same batches, each as a `Counted`; `loader` itself if it is no `DataLoader` of samples.

    It is a copy with a ``collate_fn`` of its own, the same one for a loader each time: its workers may stay.
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
    vars(copied).update(own, collate_fn=Counting(loader.collate_fn))  # past __setattr__, which refuses some of them
    return copied


_COPIES: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def reads_as_torch_does(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's own class leaves the reading to torch; what another one does cannot be done in its place."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
