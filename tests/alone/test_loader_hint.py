"""A loader that could be faster is reported, with a solution: a profile measures what part of the time it takes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cadenza.callbacks import Profile
from cadenza.loading.settings import fetching_hint
from cadenza.testing import tiny_loader, tiny_run


class Heavy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take 20 ms each, much longer than a step of the tiny model."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        return torch.ones(1), torch.ones(1)


def test_a_profile_reports_a_loader_that_prepares_slow_samples_in_the_training_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_run(loader=DataLoader(Heavy(), batch_size=2), callbacks=[Profile()], epochs=2)
    assert "% of the time went into fetching, because num_workers=0 loads the data in the training process" in caplog.text


def test_there_is_no_hint_for_workers_for_other_loaders_or_for_a_small_fraction_of_the_time() -> None:
    alone, helped = DataLoader(Heavy()), DataLoader(Heavy(), num_workers=1)
    assert fetching_hint(alone, 0.5) is not None
    assert fetching_hint(alone, 0.2) is fetching_hint(helped, 0.9) is fetching_hint(tiny_loader(), 0.9) is None
