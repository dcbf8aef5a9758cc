"""A checkpoint between the last batch of an epoch and its end continues with the same totals and bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.loading import TensorBatches

PLANS: list[Any] = [3, {0: 1, "4 steps": 2, "1 epoch": 5}, {"0.5 epoch": 3, "30 batches": 2, "50%": 4}]


def trainer(directory: Path, accumulate: Any, *callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    loader = TensorBatches(inputs, (inputs.sum(1) > 0).long(), batch_size=6, shuffle=True)
    rates = LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total))
    return Trainer(
        nn.Linear(4, 2),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        loader,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=4,
        accumulate=accumulate,
        seed=1,
        directory=directory,
        callbacks=[rates, Checkpoint("1 step", on_exception=False), *callbacks],
    )


@pytest.mark.parametrize("accumulate", PLANS, ids=str)
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_cut_before_the_end_of_an_epoch_keeps_the_total_of_steps(tmp_path: Path, accumulate: Any, epoch: int) -> None:
    whole = trainer(tmp_path / "whole", accumulate)
    steps = whole.fit().progress.step

    @on(Callback.on_epoch_end, at=epoch)
    def cut(run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", accumulate, cut).fit()
    totals = []
    look = on(Callback.on_fit_start)(lambda run: totals.append(run.progress.total("step")))
    again = trainer(tmp_path / "cut", accumulate, look)
    assert again.fit(resume="auto").progress.step == steps
    assert totals == [steps]
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
