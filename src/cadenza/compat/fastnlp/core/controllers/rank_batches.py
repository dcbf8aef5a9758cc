"""Evaluation on several processes: each reads its shard, and metrics get the batches of all ranks in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from cadenza.drivers import Driver
from cadenza.loading import resumable
from cadenza.loading.batches import moved
from cadenza.loading.loaders import Limited


def batches_of_rank(driver: Driver, model: nn.Module, loader: Any, limit: int | None) -> Iterator[Any]:
    """Yield this rank's batches of a loader, at most `limit` on each rank. Every rank must call this."""
    if driver.world_size == 1:
        yield from islice(loader, limit)
        return
    shard = driver.data_shard().uneven()
    driver.share_buffers(model)  # the buffers of the main process are saved
    read = loader if limit is None else Limited(loader, limit * driver.data_world_size)
    yield from resumable(read, 0, shard=shard).batches(0, 0)


class GatheredBatches:
    """The arguments of this rank's batches for metrics that need the batches of all ranks."""

    def __init__(self) -> None:
        self._batches: list[list[tuple[str, Mapping[str, Any]]]] = []

    def begin(self) -> None:
        """Start a batch."""
        self._batches.append([])

    def add(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Add the arguments of the metric of this name."""
        self._batches[-1].append((name, moved(dict(arguments), torch.device("cpu"))))

    def update(self, driver: Driver, metrics: Mapping[str, Any]) -> None:
        """Update metrics with the batches of all ranks, in the order of a single process. Every rank must call this."""
        batches, self._batches = self._batches, []
        if driver.world_size == 1:
            return
        for batches_at in zip_longest(*driver.gather_data(batches), fillvalue=()):
            for name, arguments in (call for batch in batches_at for call in batch):
                metric = metrics[name]
                update = metric.update if hasattr(metric, "update") else metric
                update(**moved(arguments, driver.device))
