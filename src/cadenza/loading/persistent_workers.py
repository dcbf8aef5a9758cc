"""Persistent workers over a stream: each epoch starts in them as in new workers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from cadenza.loading.loaders import set_loader_epoch
from cadenza.loading.rng import seed_host
from cadenza.loading.sample_counts import CountingCollate
from cadenza.loading.seeded import SeededWorkerInit
from cadenza.loading.workers import end_workers


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


def has_persistent_workers(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has persistent workers that read a stream."""
    return loader.persistent_workers and isinstance(loader.dataset, IterableDataset)


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
