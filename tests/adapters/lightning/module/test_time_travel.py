"""Capsules, rollbacks and recorded evaluations of a LightningModule."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer
from cadenza.callbacks import Capsule, Checkpoint, EarlyStopping, Recover, StopOnNonFinite
from cadenza.timetravel import replay_capsule, what_if
from tests.adapters.lightning.home import CPU
from tests.adapters.lightning.module.home import lightning, rows

torchmetrics: Any = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

BAD = 13


class Noted(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.steps: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        predictions = self.net(inputs)
        loss = nn.functional.mse_loss(predictions, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.error(predictions, targets)
        self.log("train_error", self.error, on_epoch=True, on_step=False)
        self.steps.append((self.trainer.global_step, self.trainer.current_epoch, batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer_in(directory: Path | None, *callbacks: Any, bad: bool = False) -> Trainer:
    torch.manual_seed(1)
    inputs, targets = rows(40).tensors
    targets = targets.clone()
    if bad:
        targets[BAD] = math.nan
    loaders = DataLoader(TensorDataset(inputs, targets), 4), DataLoader(rows(8), 4)
    arguments: dict[str, Any] = {"directory": directory, "callbacks": callbacks, **CPU}
    return Trainer.from_lightning(Noted(), loaders, max_epochs=3, **arguments)


def test_a_capsule_is_repeated_in_another_process_with_the_counters_of_its_step(tmp_path: Path) -> None:
    trainer_in(tmp_path, Capsule(most=1), bad=True).fit()
    trainer = trainer_in(None)
    again = replay_capsule(trainer, tmp_path)
    assert (again.step, again.same, again.located.rows) == (BAD // 4 + 1, True, [BAD % 4])
    module: Any = trainer.model
    assert {*module.steps} == {(BAD // 4, 0, BAD // 4)}


@pytest.mark.parametrize(
    ("make", "what"), [(Recover, "batch left out"), (partial(StopOnNonFinite, "skip"), "batch skipped")], ids=["back", "on"]
)
def test_the_values_of_a_batch_that_is_left_out_are_not_logged(tmp_path: Path, make: Any, what: str) -> None:
    run = trainer_in(tmp_path / "run", make(), Capsule(), Checkpoint("1 epoch"), bad=True).fit()
    other = trainer_in(tmp_path / "other", make(), Checkpoint("1 epoch"), bad=True).fit()
    assert [one for one in run.decisions if one.what == what]
    for name in ("train_loss_step", "train_loss_epoch", "train_error"):
        assert all(math.isfinite(value) for _, value in run.history[name]), name
        assert run.history[name] == other.history[name]  # the second pass of the capsule counts nothing
    assert len(run.history["train_loss_step"]) == 30 - 3  # once in each epoch
    assert run.outcome is not None
    assert "not finite" not in run.outcome.reason


def test_what_if_knows_the_names_of_a_module(tmp_path: Path) -> None:
    stop = EarlyStopping("val_loss", "min", patience=1, min_delta=10.0)
    trainer_in(tmp_path / "long").fit()
    stopped = trainer_in(tmp_path / "stopped", stop).fit()
    answer = what_if(tmp_path / "long", [EarlyStopping("val_loss", "min", patience=1, min_delta=10.0)])
    assert answer.stopped is not None
    assert (answer.step, answer.stopped.why) == (stopped.progress.step, stopped.outcome.reason)  # type: ignore[union-attr]
