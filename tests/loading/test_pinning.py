"""On CUDA, batches of workers are pinned automatically, and containers keep their types."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cadenza.loading import resumable
from cadenza.loading.batches import pinned
from cadenza.loading.sample_counts import CountedBatch
from tests.loading.data import Numbers

Pair = namedtuple("Pair", "inputs rest")


class Pinning(Tensor):
    """A tensor that can be pinned without an accelerator."""

    def pin_memory(self, device: Any = None) -> Tensor:
        return self.as_subclass(Tensor) + 100


def zero() -> Tensor:
    return torch.zeros(2).as_subclass(Pinning)


def test_every_tensor_is_pinned_and_every_container_keeps_its_type() -> None:
    batch = {"pair": Pair(zero(), [zero(), "text", None]), "tuple": (zero(), 3)}
    there = pinned(batch)
    assert isinstance(there["pair"], Pair)
    assert isinstance(there["tuple"], tuple)
    parts = [there["pair"].inputs, there["pair"].rest[0], there["tuple"][0]]
    assert [part.tolist() for part in parts] == [[100, 100]] * 3
    assert there["pair"].rest[1:] == ["text", None]
    assert there["tuple"][1] == 3
    assert CountedBatch(zero(), 2).pin_memory().batch.tolist() == [100, 100]


def as_tuple(samples: list[Tensor]) -> tuple[Tensor, str]:
    return torch.stack(samples), "text"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_does_not_change_batches(workers: int) -> None:
    def read(pin: bool, skip: int) -> list[Any]:
        loader = DataLoader(Numbers("numpy"), 4, shuffle=True, num_workers=workers, collate_fn=as_tuple)
        batches = list(resumable(loader, 1, pin=pin).batches(0, skip))
        assert all(isinstance(batch, tuple) for batch in batches)
        assert all(batch[0].is_pinned() for batch in batches if pin and workers and torch.cuda.is_available())
        return [(numbers.tolist(), text) for numbers, text in batches]

    whole = read(False, 0)
    assert read(True, 0) == whole
    assert read(True, 2) == whole[2:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch only warns where there is no accelerator")
def test_the_thread_of_the_loader_pins_and_only_with_workers() -> None:
    loader = DataLoader(Numbers(), 4)
    list(resumable(loader, 1, pin=True).batches(0, 0))  # a warning would be an error
    with pytest.warns(UserWarning, match="pin_memory"):
        list(resumable(DataLoader(Numbers(), 4, num_workers=1), 1, pin=True).batches(0, 0))
