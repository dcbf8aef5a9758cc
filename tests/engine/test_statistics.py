"""Buffers that a forward pass changes are kept as they were before it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Capsule, Checkpoint, Recover
from cadenza.engine.statistics import Statistics
from cadenza.testing import tiny_loader, tiny_trainer
from cadenza.timetravel import replay_capsule


class Replacing(nn.Module):
    """A layer that puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.running_mean: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.running_mean


class Counting(nn.Module):
    """A layer with a buffer that is no statistic. The second writes past the version counter, as some quantizers do."""

    def __init__(self, past: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.count: Tensor
        self.past = past

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            count = self.count.data if self.past else self.count
            count.add_(inputs.detach().abs().mean(0))
        return inputs * (1 + self.count / 10)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "replaces": Replacing,
    "counts": Counting,
    "counts past versions": lambda: Counting(past=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(2),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2), MAKERS[kind](), nn.Linear(2, 1))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_capsule_holds_all_buffers_of_before_the_step_and_repeats_it(kind: str, tmp_path: Path) -> None:
    losses: list[float] = []

    @on(Callback.on_before_backward)
    def look(run: Run, outputs: MutableMapping[str, Any]) -> None:
        losses.append(outputs["loss"].item())
        if run.progress.step == 4:
            raise ArithmeticError

    trainer = tiny_trainer(model=made(kind), directory=tmp_path, batches=6, callbacks=[look, Capsule()])
    with pytest.raises(ArithmeticError):
        trainer.fit()
    again = replay_capsule(tiny_trainer(model=made(kind)), tmp_path)
    assert again.exact
    assert again.losses == losses[-1:]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_that_is_left_out_changes_no_buffer(kind: str, tmp_path: Path) -> None:
    loader = tiny_loader(8)
    loader[6][0][1] = float("nan")
    callbacks = [Recover(), Checkpoint("2 steps")]
    run = tiny_trainer(model=made(kind), loader=loader, directory=tmp_path, callbacks=callbacks).fit()
    assert all(one.isfinite().all() for one in run.model.state_dict().values())
    assert len([one for one in run.decisions if one.what == "batch left out"]) == 1


@pytest.mark.parametrize("kind", MAKERS)
def test_the_values_come_back_whatever_step_changes_them_first(kind: str) -> None:
    model = made(kind)
    statistics = Statistics(model)
    for step in range(6):
        statistics.keep()
        before = {name: one.clone() for name, one in model.named_buffers()}
        model.train(step % 2 == 0)
        model(torch.rand(4, 1))
        statistics.restore()
        assert all(torch.equal(one, before[name]) for name, one in model.named_buffers())
        model(torch.rand(4, 1))


def test_a_buffer_that_changes_late_is_noticed_and_one_that_cannot_be_set_is_left_alone() -> None:
    model = made("counts")
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    statistics = Statistics(model)
    for _ in range(3):
        statistics.keep()
    assert not statistics.copies
    model(torch.rand(4, 1))
    statistics.keep()
    before = model.get_buffer("1.count").clone()
    model(torch.rand(4, 1))
    statistics.restore()
    assert torch.equal(model.get_buffer("1.count"), before)
