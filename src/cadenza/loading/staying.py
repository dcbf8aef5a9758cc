"""Persistent workers of a stream: each epoch begins in them as in new workers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from cadenza.loading.batches import announce_epoch
from cadenza.loading.counting import Counting
from cadenza.loading.seeded import SeededStart, seed_here


class StayingWorkers:
    """A `DataLoader` over a stream with ``persistent_workers=True``. Each epoch depends only on its number.

    torch seeds a worker only when it starts. Random numbers in a later epoch then depend on all earlier draws, which no
    checkpoint holds. This class seeds each worker at the start of every epoch, after `worker_init_fn`, and calls ``set_epoch``
    of its copy of the data set. Attributes that the copy changes are not reset.

    torch seeds the workers of an `IterDataPipe` only in part, so these workers are restarted in each epoch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._given, self._loader, self._epoch = loader, copy(loader), 0
        self.generator = loader.generator
        self._stream: _Stream | None = None
        changed = vars(self._loader)  # the loader rejects assignments to these
        changed["_iterator"] = None
        if loader.batch_sampler is not None:
            changed["collate_fn"] = Counting(loader.collate_fn)
        if isinstance(loader.dataset, IterDataPipe):
            changed["persistent_workers"] = False
        else:
            changed["dataset"] = self._stream = _Stream(loader.dataset)
            changed["worker_init_fn"] = SeededStart(loader.worker_init_fn)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        announce_epoch(self._given, epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
            self._stream.begin(int(drawn.item()), self._epoch)
        return iter(self._loader)


def workers_stay(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has persistent workers that read a stream."""
    return loader.persistent_workers and isinstance(loader.dataset, IterableDataset)


class _Stream(IterableDataset[Any]):
    """The data set in a worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._now = torch.zeros(
            2, dtype=torch.int64, device="cpu"
        ).share_memory_()  # seed and epoch, shared with running workers

    def begin(self, seed: int, epoch: int) -> None:
        """Send the seed and the epoch of the next pass to the workers."""
        self._now.copy_(torch.tensor([seed, epoch], dtype=torch.int64, device="cpu"))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch = self._now.tolist()
        own = seed + (0 if info is None else info.id)
        if info is not None:
            object.__setattr__(info, "seed", own)  # its own __setattr__ rejects this
        seed_here(own)
        announce_epoch(self, epoch)
        return iter(self.dataset)
