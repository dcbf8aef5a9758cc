"""Ranks share tensors in memory out: the gradients and the results of one process, and each sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.distributed.parts import Batch, samples, squared_error, trainer, weights_of


def in_memory(count: int = 24) -> TensorBatches[tuple[Tensor, ...]]:
    return TensorBatches(*samples(count).tensors, batch_size=4, shuffle=True)


def test_two_ranks_train_and_evaluate_as_one_process_that_accumulates_two_batches() -> None:
    def both() -> tuple[Tensor, dict[str, float]]:
        one = trainer(in_memory())
        one.fit()
        return weights_of(one), one.evaluate(in_memory(22), compute=lambda model, batch: {"loss": squared_error(model, batch)})

    alone = trainer(in_memory(), accumulate=2)
    alone.fit()
    results = alone.evaluate(in_memory(22), compute=lambda model, batch: {"loss": squared_error(model, batch)})
    for weights, judged in launch(both):
        assert torch.allclose(weights, weights_of(alone), atol=1e-6)
        assert judged == pytest.approx(results, rel=1e-5)


def test_every_sample_is_seen_once_an_epoch_and_a_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    def seen(directory: Path, resume: bool, steps: int | None) -> tuple[list[int], Tensor]:
        numbers: list[int] = []

        @on(Callback.on_batch_start)
        def see(run: Run, batch: Batch) -> None:
            numbers.extend(batch[2].tolist())

        one = trainer(in_memory(37), max_steps=steps, directory=directory, callbacks=[see, Checkpoint("1 step")])
        one.fit(resume="auto" if resume else False)
        return numbers, weights_of(one)

    def three() -> tuple[list[int], list[int], bool]:
        whole, expected = seen(tmp_path / "whole", False, None)
        first, _ = seen(tmp_path / "cut", False, 5)
        rest, weights = seen(tmp_path / "cut", True, None)
        return whole, first + rest, torch.equal(weights, expected)

    ranks = launch(three)
    assert Counter(number for whole, _, _ in ranks for number in whole) == dict.fromkeys(range(37), 2)
    assert all(whole == cut and same for whole, cut, same in ranks)
