"""Workers that stay over several epochs of a stream: each epoch begins in them as it begins in new ones."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from cadenza.batching import announce_epoch
from cadenza.loading.seeded import SeededStart, seed_here


class StayingWorkers:
    """A `DataLoader` over a stream with ``persistent_workers=True`` whose epochs depend on their number alone.

    torch seeds a worker when it starts, and tells it nothing at a later epoch: what it draws then depends on all that it drew
    before, which no checkpoint holds. Here each worker is seeded at the start of every epoch, after `worker_init_fn`, and its
    copy of the data set gets the ``set_epoch`` of that epoch. Attributes that the copy changes itself are not put back.

    The workers of an `IterDataPipe`, which torch seeds itself and in part only, are started anew in each epoch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._given, self._loader, self._epoch = loader, copy(loader), 0
        self.generator = loader.generator
        self._stream: _Stream | None = None
        changed = vars(self._loader)  # the loader refuses to have these set
        changed["_iterator"] = None
        if isinstance(loader.dataset, IterDataPipe):
            changed["persistent_workers"] = False
        else:
            changed["dataset"] = self._stream = _Stream(loader.dataset)
            changed["worker_init_fn"] = SeededStart(loader.worker_init_fn)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of `epoch`."""
        announce_epoch(self._given, epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
            self._stream.begin(int(drawn.item()), self._epoch)
        return iter(self._loader)


def workers_stay(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's workers read a stream over several epochs."""
    return loader.persistent_workers and isinstance(loader.dataset, IterableDataset)


class _Stream(IterableDataset[Any]):
    """The data set as a worker reads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._now = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()  # seed and epoch, also for workers that run

    def begin(self, seed: int, epoch: int) -> None:
        """Tell the workers what the next pass is."""
        self._now.copy_(torch.tensor([seed, epoch], dtype=torch.int64, device="cpu"))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch = self._now.tolist()
        own = seed + (0 if info is None else info.id)
        if info is not None:
            object.__setattr__(info, "seed", own)  # it refuses to be set
        seed_here(own)
        announce_epoch(self, epoch)
        return iter(self.dataset)
