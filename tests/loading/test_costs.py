"""What makes reading data slow is said, with what to do."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cadenza.callbacks import Profile
from cadenza.loading.costs import slow_fetching
from cadenza.testing import tiny_loader, tiny_run


class Heavy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take 20 ms each: more than a step of the tiny model by far."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        return torch.ones(1), torch.ones(1)


def test_a_profile_names_a_loader_that_prepares_heavy_samples_in_the_trainings_own_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_run(loader=DataLoader(Heavy(), batch_size=2), callbacks=[Profile()], epochs=2)
    assert "% of the time went into fetching, and num_workers=0 does that in the training's own process" in caplog.text


def test_it_says_nothing_of_workers_of_other_loaders_and_of_little_time() -> None:
    alone, helped = DataLoader(Heavy()), DataLoader(Heavy(), num_workers=1)
    assert slow_fetching(alone, 0.5) is not None
    assert slow_fetching(alone, 0.2) is slow_fetching(helped, 0.9) is slow_fetching(tiny_loader(), 0.9) is None
