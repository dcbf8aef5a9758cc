"""An evaluation on several processes: each reads its part, and metrics see what they see in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from cadenza.drivers import Driver
from cadenza.loading import resumable
from cadenza.loading.batches import moved
from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.shards import check_enough_batches


def share_of(driver: Driver, model: nn.Module, loader: Any, limit: int | None) -> Iterator[Any]:
    """Yield this rank's batches of a loader, at most `limit` on each rank. Every rank must call this.

    Raises:
        DataError: There are fewer batches than ranks.
    """
    if driver.world_size == 1:
        yield from islice(loader, limit)
        return
    shard = driver.data_shard().uneven()
    check_enough_batches(loader, length_of(loader), shard, "a loader of the evaluation")
    driver.share_buffers(model)  # those of the main process are the ones that are saved
    read = loader if limit is None else Limited(loader, limit * driver.world_size)
    yield from resumable(read, 0, shard=shard).batches(0, 0)


class Held:
    """What this rank's batches have for metrics that must see those of all ranks."""

    def __init__(self) -> None:
        self._batches: list[list[tuple[str, Mapping[str, Any]]]] = []

    def begin(self) -> None:
        """A batch begins."""
        self._batches.append([])

    def add(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Hold what the metric of this name is to get."""
        self._batches[-1].append((name, moved(dict(arguments), torch.device("cpu"))))

    def hand_out(self, driver: Driver, metrics: Mapping[str, Any]) -> None:
        """Give metrics what all ranks hold, in the order of one process. Every rank must call this."""
        batches, self._batches = self._batches, []
        if driver.world_size == 1:
            return
        for turn in zip_longest(*driver.gather(batches), fillvalue=()):
            for name, arguments in (one for batch in turn for one in batch):
                metric = metrics[name]
                update = metric.update if hasattr(metric, "update") else metric
                update(**moved(arguments, driver.device))
