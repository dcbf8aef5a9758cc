"""Any iterable of batches as a loader: its length, its epoch, and its first batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cadenza.loading.workers import end_workers


class Limited:
    """The first `count` batches of each pass over a loader."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader: Iterable[Any] = loader
        self.count: int = count

    def __iter__(self) -> Iterator[Any]:
        # Not islice, which would read one batch more than it yields.
        batches = iter(self.loader)
        try:
            for _ in range(self.count):
                try:
                    yield next(batches)
                except StopIteration:
                    return
        finally:
            end_workers(batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        set_loader_epoch(self.loader, epoch)

    def __len__(self) -> int:
        known = length_of(self.loader)
        return self.count if known is None else min(self.count, known)


def length_of(loader: object) -> int | None:
    """Return the number of batches in one pass over `loader`; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # no __len__, or a DataLoader over a stream
        return None


def set_loader_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its samplers and its dataset, where they have this method."""
    named = ("sampler", "batch_sampler", "dataset")
    for part in (loader, *(getattr(loader, name, None) for name in named)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        elif is_of(part, "streaming", "StreamingDataset"):  # it counts its passes, and a new process would begin at 0
            part.next_epoch = epoch  # type: ignore[union-attr]


def is_of(loader: object, package: str, name: str) -> bool:
    """Return whether an object is an instance of a class of a package that need not be installed."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(loader).__mro__)
