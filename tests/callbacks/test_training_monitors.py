"""Monitors of results of the training, such as "train/loss", without an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, LearningRate, LogTraining
from cadenza.errors import MonitorError
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from cadenza.timetravel import what_if
from tests.callbacks.test_interval_means import mean, numbered, scripted
from tests.distributed.parts import driver

LOSSES = [3.0, 1.5, 7.0, 2.25]


def worse_each_epoch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return losses of which the mean grows from epoch to epoch: the weight counts the batches."""
    loss = LOSSES[int(batch[0].item())] + 0.0 * model(batch[0]).sum()
    return {"loss": loss + model.weight.sum().detach(), "grown": model.weight.sum().detach()}  # type: ignore[operator]


class Grow(torch.optim.SGD):
    """Adds 1 to the weight in each update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)


def trainer(*callbacks: Any, **arguments: Any) -> Trainer:
    def model() -> nn.Linear:
        made = nn.Linear(1, 1)
        nn.init.zeros_(made.weight)
        return made

    given = {
        "compute_loss": worse_each_epoch,
        "max_epochs": None if "max_steps" in arguments else 4,
        "progress": False,
        **({} if "driver" in arguments else {"device": "cpu"}),
        **arguments,
    }
    return Trainer(model, lambda ones: Grow(ones, 0.0), numbered(4), callbacks=callbacks, **given)


def test_a_loss_of_the_training_stops_a_run_and_chooses_weights_without_further_arguments(tmp_path: Path) -> None:
    stop, best = EarlyStopping("train/loss", patience=2), BestWeights("train/loss")
    one = trainer(stop, best, Checkpoint(keep_best="train/loss", keep_last=1), directory=tmp_path)
    run = one.fit()
    assert run.outcome is not None
    assert run.outcome.reason.startswith("'train/loss' did not get better than")
    assert (run.progress.epoch, stop.monitor.best) == (3, run.history["train/loss"][0][1])
    assert best.step == 4
    assert sorted(one.name for one in (tmp_path / "checkpoints").glob("step*")) == ["step-00000004", "step-00000012"]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000004"
    assert run.why("stopped").startswith("stopped by EarlyStopping at epoch 3")
    assert "on_eval_end" not in run.why("never fired")


def test_the_value_is_that_of_the_record_also_with_several_losses() -> None:
    stop = EarlyStopping(("train/grown", "max"), patience=9)
    run = trainer(stop).fit()
    assert stop.monitor.best == run.history["train/grown"][-1][1]
    assert stop.stale == 0


def test_each_interval_of_a_log_training_is_judged_with_its_metrics() -> None:
    log = LogTraining("2 steps", metrics={"acc": MulticlassAccuracy(2)}, throughput=False)
    losses, accuracy = EarlyStopping("train/loss", patience=3), EarlyStopping(("train/acc", "max"), patience=9)
    inputs, targets = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(32, dtype=torch.long)
    run = Trainer(
        lambda: nn.Linear(3, 2),
        lambda parameters: torch.optim.SGD(parameters, 0.5),
        TensorBatches(inputs, targets, batch_size=8),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=1,
        callbacks=[losses, log, accuracy],
        progress=False,
        device="cpu",
    ).fit()
    assert losses.seen == accuracy.seen == 4
    assert losses.monitor.best == min(value for _, value in run.history["train/loss"])
    assert accuracy.monitor.best == max(value for _, value in run.history["train/acc"])


def test_a_plateau_follows_the_training() -> None:
    fall = LearningRate(
        lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=1, factor=0.5), monitor="train/loss"
    )
    trainer(fall, max_epochs=5).fit()
    assert fall.scheduler is not None
    assert fall.scheduler.state_dict()["last_epoch"] == 5


def test_a_subclass_of_a_user_is_called_too() -> None:
    class Mine(EarlyStopping):
        pass

    run = trainer(Mine("train/loss")).fit()
    assert run.progress.epoch == 2


def test_a_limit_inside_an_epoch_is_judged_by_checkpoint_alone_so_that_a_longer_run_has_the_same_result(tmp_path: Path) -> None:
    def fit(steps: int, folder: str) -> tuple[EarlyStopping, Run]:
        stop = EarlyStopping("train/loss", patience=3)
        one = trainer(stop, Checkpoint("1 step", keep_best="train/loss"), max_steps=steps, directory=tmp_path / folder)
        return stop, one.fit(resume="auto")

    early, run = fit(2, "cut")
    assert early.seen == 0
    assert (tmp_path / "cut" / "checkpoints" / "best").resolve().name.startswith("step-00000002")
    assert "train/loss" in run.why("best kept")
    (cut, second), (whole, run) = fit(12, "cut"), fit(12, "whole")
    assert cut.state_dict() == whole.state_dict()
    assert second.progress.step == run.progress.step == 12
    assert second.outcome == run.outcome


def test_a_name_that_the_training_does_not_log_is_an_error() -> None:
    with pytest.raises(MonitorError, match=r"will log only \['train/loss'\]. Did you mean 'train/loss'\?"):
        trainer(EarlyStopping("train/los", "min"), compute_loss=supervised(nn.MSELoss()))
    with pytest.raises(MonitorError, match=r"will log only \['train/loss'\]. Add it to LogTraining"):
        trainer(EarlyStopping("train/lr", "min"), compute_loss=supervised(nn.MSELoss()))
    with pytest.raises(ValueError, match=r"Did you mean 'train/loss', which needs no mode\?"):
        EarlyStopping("train/los", patience=3)
    with pytest.raises(MonitorError, match=r"logged only \['train/grown', 'train/loss'\]. Did you mean 'train/grown'\?"):
        trainer(EarlyStopping("train/grow", "max")).fit()
    with pytest.raises(MonitorError, match=r"LogTraining\(outputs=..., metrics=...\)"):
        trainer(EarlyStopping("train/grown", "max"), LogTraining("1 epoch")).fit()
    with pytest.raises(MonitorError, match=r"watches 'val_loss'.*Did you mean 'eval/loss'\?"):
        trainer(EarlyStopping("val_loss"))


def test_what_if_judges_the_recorded_means(tmp_path: Path) -> None:
    trainer(directory=tmp_path).fit()
    answer = what_if(tmp_path, [EarlyStopping("train/loss", patience=2)])
    assert answer.stopped is not None
    assert answer.step == 12
    assert answer.stopped.why.startswith("'train/loss' did not get better than")
    assert what_if(tmp_path, [EarlyStopping(("train/grown", "max"), patience=2)]).stopped is None
    with pytest.raises(MonitorError, match="'train/growth'"):
        what_if(tmp_path, [EarlyStopping(("train/growth", "max"))])


def test_several_results_may_be_kept_by_name_or_pair() -> None:
    for keep in ("train/loss", ["train/loss"], [("train/loss", "min")], ("train/loss", "min")):
        assert [one.mode for one in Checkpoint(keep_best=keep).monitors] == ["min"]  # type: ignore[arg-type]
    both = Checkpoint(keep_best=["train/loss", ("train/grown", "max")])
    assert [(one.name, one.mode) for one in both.monitors] == [("train/loss", "min"), ("train/grown", "max")]


def test_all_ranks_judge_the_mean_of_all() -> None:
    losses, weights = [5.0, 1.0, 2.0, 4.0], [1, 3, 2, 2]

    def work() -> Any:
        stop = EarlyStopping("train/loss")
        run = trainer(stop, compute_loss=scripted(losses, weights), driver=driver()).fit()
        return stop.monitor.best, run.history["train/loss"][0][1], run.progress.epoch

    expected = pytest.approx(mean(losses, weights), rel=1e-15)
    assert launch(work) == [(expected, expected, 2)] * 2
