"""What tests of the engine share: the moments of a run, and batches of many kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from cadenza import Callback
from cadenza.testing import Recorder, tiny_loader, tiny_run


def moments(*callbacks: Callback, **arguments: Any) -> list[str]:
    """Return the moments of a run that holds `callbacks` after a recorder."""
    recorder = Recorder()
    tiny_run(callbacks=[recorder, *callbacks], **arguments)
    return recorder.names


def unequal(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of these sizes, of ``y = 2x + 1``."""
    inputs = torch.linspace(-1, 1, sum(sizes)).unsqueeze(1)
    return list(zip(inputs.split(list(sizes)), (2 * inputs + 1).split(list(sizes)), strict=True))


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def broken() -> Iterator[Any]:
    """Yield one batch, and fail."""
    yield from tiny_loader(1)
    raise OSError("the disk is gone")


class Stream(IterableDataset[Any]):
    """A data set that does not know its length."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))
