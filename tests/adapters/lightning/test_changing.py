"""Callbacks of Lightning that change the run: averages, frozen parts, pruning, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch import callbacks as pl_callbacks

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.errors import AdapterError
from tests.adapters.lightning.at_home import CPU, BreaksAt, Net, at_home, loader, natively, same, trainer_of

SWA = pl_callbacks.StochasticWeightAveraging
Make = Callable[[], Any]


class EpochAverage(pl_callbacks.WeightAveraging):
    """Averages after each epoch, as the documentation shows."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


class HeadFirst(pl_callbacks.BaseFinetuning):
    """Trains the backbone from the second epoch on, in a parameter group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class Seen(pl_callbacks.Callback):
    """Records what a validation sees: the sum of the weights, and the learning rates; and the masks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            weights = float(sum(one.double().sum() for one in pl_module.parameters()))
            self.seen.append((trainer.global_step, weights, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "StochasticWeightAveraging": (lambda: SWA(0.02, swa_epoch_start=0.5, annealing_epochs=2), {}),
    "StochasticWeightAveraging, linear": (lambda: SWA([0.02], swa_epoch_start=2, annealing_strategy="linear"), {}),
    "StochasticWeightAveraging, BatchNorm": (lambda: SWA(0.02, swa_epoch_start=2), {"norm": True}),
    "StochasticWeightAveraging, a schedule": (lambda: SWA(0.02, swa_epoch_start=2), {"schedule": halved}),
    "WeightAveraging": (pl_callbacks.WeightAveraging, {"norm": True}),
    "WeightAveraging, by epoch": (EpochAverage, {}),
    "EMAWeightAveraging": (lambda: pl_callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=2), {}),
    "BaseFinetuning": (HeadFirst, {}),
    "BackboneFinetuning": (lambda: pl_callbacks.BackboneFinetuning(1, lambda epoch: 1.5), {"norm": True}),
    "ModelPruning": (lambda: pl_callbacks.ModelPruning("l1_unstructured", amount=0.3), {}),
    "ModelPruning, after validation": (
        lambda: pl_callbacks.ModelPruning(
            "ln_structured",
            pruning_dim=0,
            pruning_norm=2,
            use_global_unstructured=False,
            amount=0.3,
            parameter_names=["weight"],
            prune_on_train_epoch_end=False,
            make_pruning_permanent=False,
        ),
        {},
    ),
    "ModelPruning, lottery ticket": (
        lambda: pl_callbacks.ModelPruning("l1_unstructured", amount=lambda epoch: 0.2, use_lottery_ticket_hypothesis=True),
        {},
    ),
    "GradientAccumulationScheduler": (lambda: pl_callbacks.GradientAccumulationScheduler({0: 5, 2: 1}), {}),
}


def callbacks_of(name: str) -> tuple[list[Any], dict[str, Any], list[Any]]:
    make, given = CASES[name]
    schedule = given.get("schedule")
    return [make(), Seen()], given, [LearningRate(schedule, per="epoch")] if schedule else []


def rounded(seen: list[Any]) -> list[Any]:
    return [[float(f"{value:.5g}") for value in row] for row in seen]


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
@pytest.mark.parametrize("name", CASES)
def test_a_callback_has_its_effect(name: str, tmp_path: Path) -> None:
    (home, seen_at_home), given, _ = callbacks_of(name)
    (here, seen), _, rates = callbacks_of(name)
    expected, module = Net(**given), Net(**given)
    at_home(expected, [home, seen_at_home], tmp_path, max_epochs=4)
    natively(module, [*rates, here, seen], max_epochs=4)

    assert same(module, expected)
    assert rounded(seen.seen) == rounded(seen_at_home.seen)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
@pytest.mark.parametrize("name", ["StochasticWeightAveraging, a schedule", "StochasticWeightAveraging", "BackboneFinetuning"])
def test_a_callback_has_its_effect_on_a_lightning_module(name: str, tmp_path: Path) -> None:
    (home, seen_at_home), given, _ = callbacks_of(name)
    expected = Net(**given)
    at_home(expected, [home, seen_at_home], tmp_path, max_epochs=4)

    def train(*others: Any) -> tuple[nn.Module, Any]:
        (here, seen), module = callbacks_of(name)[0], Net(**given)
        callbacks = [*others, here, seen, Checkpoint("11 steps", on_exception=True)]
        data, directory = (loader(), loader(6, 1)), tmp_path / ("parts" if others or (tmp_path / "parts").exists() else "run")
        trainer = Trainer.from_lightning(module, data, callbacks=callbacks, max_epochs=4, seed=1, directory=directory, **CPU)
        trainer.fit(resume="auto")
        return module, seen

    module, seen = train()
    assert same(module, expected)
    assert rounded(seen.seen) == rounded(seen_at_home.seen)
    with pytest.raises(RuntimeError, match="broken"):
        train(BreaksAt(12))
    continued, seen_again = train()
    assert same(continued, expected)
    assert rounded(seen_again.seen) == rounded(seen_at_home.seen)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def train(folder: str, *others: Any) -> tuple[nn.Module, Any]:
        callbacks, given, rates = callbacks_of(name)
        module, saves = Net(**given), Checkpoint("11 steps", on_exception=True)
        trainer = trainer_of(module, [*rates, *others, *callbacks, saves], directory=tmp_path / folder, max_epochs=4)
        trainer.fit(resume="auto")
        return module, callbacks[1]

    whole, seen = train("whole")
    for batch in (7, 15, 18):
        with pytest.raises(RuntimeError, match="broken"):
            train("parts", BreaksAt(batch))
    continued, seen_again = train("parts")
    assert same(continued, whole)
    assert rounded(seen_again.seen) == rounded(seen.seen)


@pytest.mark.parametrize("name", ["BatchSizeFinder", "LearningRateFinder"])
def test_a_callback_that_runs_the_loops_of_lightning_is_refused(name: str) -> None:
    kind = getattr(pl_callbacks, name)
    for made in (kind(), type("Own", (kind,), {})()):
        with pytest.raises(AdapterError, match=r"does not work in a native run.*cadenza\.callbacks\.Find") as caught:
            trainer_of(Net(), [made])
        assert type(made).__name__ in str(caught.value)


def test_accumulation_is_set_in_one_place() -> None:
    scheduler = pl_callbacks.GradientAccumulationScheduler({0: 1, 1: 5})
    trainer = trainer_of(Net(), [scheduler])
    assert str(trainer.accumulate) == "1 batch, 5 from 1 epoch on"
    assert trainer.fit().progress.step == 5 + 1 + 1
    with pytest.raises(ValueError, match=r"Scheduler sets the batches in a step.*Keep Trainer\(accumulate="):
        trainer_of(Net(), [scheduler], accumulate=2)


def test_a_finetuning_callback_freezes_once(tmp_path: Path) -> None:
    class Counts(HeadFirst):
        frozen = 0

        def freeze_before_training(self, pl_module: Any) -> None:
            self.frozen += 1
            super().freeze_before_training(pl_module)

    theirs, ours = Counts(), Counts()
    at_home(Net(), [theirs], tmp_path, max_epochs=1)
    trainer = trainer_of(Net(), [ours], max_epochs=1)
    trainer.fit()
    assert ours.frozen == theirs.frozen == 1
    trainer.fit()
    assert ours.frozen == 2
