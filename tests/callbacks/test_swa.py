"""Swa: the run ends with the average of its last weights."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Ema, Evaluate, Freeze, LearningRate, LogTraining, Swa
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.held_weights import holders_in
from cadenza.status.plain import same
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import normed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def shuffled() -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, 20).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=4, shuffle=True)


class Weights(Callback):
    """Notes the weight after each step, and the rate with which it was made."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.rates: list[float] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        self.rates.append(float(run.optimizers[0].param_groups[0]["lr"]))

    def on_step_end(self, run: Run) -> None:
        self.at[run.progress.step] = run.model.get_parameter("weight").item()


# -- what is averaged ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, [30, 35, 40]),  # 8 epochs of 5 steps: from 0.75 of them on
        ({"start": 0.7}, [30, 35, 40]),
        ({"start": "7 epochs"}, [35, 40]),
        ({"start": "37 steps"}, [40]),
        ({"start": 0.9, "every": "2 steps"}, [36, 38, 40]),
        ({"start": "1.5 epoch", "every": "2.5 epoch"}, [13, 25, 38]),
    ],
)
def test_the_run_ends_with_the_mean_of_the_weights_from_the_start_on(arguments: dict[str, Any], steps: list[int]) -> None:
    weights = Weights()
    run = tiny_run(epochs=8, callbacks=[weights, Swa(**arguments)])
    expected = sum(weights.at[step] for step in steps) / len(steps)
    assert run.model.get_parameter("weight").item() == pytest.approx(expected, rel=1e-6)
    assert run.why("averaged weights in place").endswith(f"'swa', the average of {len(steps)} updates")


def test_it_can_only_keep_the_average() -> None:
    weights, swa = Weights(), Swa(0.5, use_at_end=False)
    run = tiny_run(epochs=4, callbacks=[weights, swa])
    assert run.model.get_parameter("weight").item() == weights.at[20]
    with swa.in_place(run):
        assert run.model.get_parameter("weight").item() != weights.at[20]


def test_a_stop_ends_with_the_average_so_far_and_one_before_the_start_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def stopped(step: int) -> Run:
        stop = on(Callback.on_step_end, at=step)(lambda run: run.stop("enough"))
        return tiny_run(epochs=8, callbacks=[Swa("2 epochs"), stop])

    assert stopped(23).why("averaged weights in place").endswith("the average of 3 updates")
    with caplog.at_level(logging.WARNING):
        stopped(7)
    assert "Swa: the run ended before the first average, so the model keeps its own weights" in caplog.text


def test_it_lives_beside_an_ema_and_another_swa() -> None:
    weights = Weights()
    callbacks = [weights, Swa("2 epochs", use_at_end=False), Swa("3 epochs", name="late"), Ema(0.9)]
    run = tiny_run(epochs=4, callbacks=callbacks)
    assert list(holders_in(hooks_of(run))) == ["swa", "late", "ema"]
    assert run.model.get_parameter("weight").item() == pytest.approx((weights.at[15] + weights.at[20]) / 2, rel=1e-6)


# -- the learning rate --------------------------------------------------------------------------------


def rates_of_torch(steps: int, anneal: int) -> list[float]:
    """Return the rates of so many updates, after torch's own scheduler was stepped before each."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.5, anneal_epochs=anneal)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("anneal", [0, 1, 4, 30])
def test_the_rates_are_those_of_torchs_scheduler_and_each_is_logged_before_its_update(anneal: int) -> None:
    weights = Weights()
    run = tiny_run(epochs=4, callbacks=[weights, Swa(0.5, lr=0.5, anneal_steps=anneal), LogTraining("1 step")])
    assert weights.rates == pytest.approx([0.1] * 10 + rates_of_torch(10, anneal))
    logged = dict(run.history["train/lr"])
    assert [logged[step] for step in range(11, 20)] == weights.rates[11:]


def falling(optimizer: Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.9)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=100)


@pytest.mark.parametrize("swa_first", [True, False])
@pytest.mark.parametrize("schedule", ["step", "epoch", "evaluation"])
def test_from_the_start_on_its_rate_is_in_force_whatever_other_schedule_there_is(swa_first: bool, schedule: Any) -> None:
    rate = LearningRate(plateau, monitor="eval/loss") if schedule == "evaluation" else LearningRate(falling, per=schedule)
    weights, swa, log = Weights(), Swa("2 epochs", lr=0.5), LogTraining("1 step")
    evaluate = Evaluate(tiny_loader(2))
    both = [swa, rate] if swa_first else [rate, swa]
    run = tiny_run(epochs=4, callbacks=[weights, evaluate, *both, log])
    assert weights.rates[10:] == [0.5] * 10
    assert all(rate <= 0.1 for rate in weights.rates[:10])
    assert min(weights.rates) < 0.1
    logged = dict(run.history["train/lr"])
    assert [logged[step] for step in range(11, 20)] == [0.5] * 9  # the rate of the next update


def test_each_group_goes_there_from_its_own_rate() -> None:
    rates: list[list[float]] = []
    look = on(Callback.on_before_optimizer_step)(
        lambda run: rates.append([float(group["lr"]) for group in run.optimizers[0].param_groups])
    )

    def two(parameters: Any) -> Optimizer:
        return SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": torch.tensor(0.3)}], lr=1.0)

    run = tiny_run(epochs=4, optimizer=two, callbacks=[look, Swa(0.5, lr=0.5, anneal_steps=2)])
    assert rates[9:12] == [pytest.approx([0.1, 0.3]), pytest.approx([0.3, 0.4]), pytest.approx([0.5, 0.5])]
    assert isinstance(run.optimizers[0].param_groups[1]["lr"], Tensor)  # a compiled step reads it there


# -- statistics of BatchNorm --------------------------------------------------------------------------


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize(("batches", "seen"), [(None, 5), (2, 2), (9, 5)])
def test_the_statistics_are_those_of_torchs_own_function(batches: int | None, seen: int) -> None:
    swa = Swa(0.5, update_batch_norm=batches)
    run = tiny_run(model=normed(), epochs=4, callbacks=[swa])
    expected = normed()
    expected.load_state_dict(run.model.state_dict())
    update_bn(tiny_loader()[:seen], expected)
    assert same(buffers(run.model), buffers(expected))
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", run.model)[1]).momentum == 0.1
    assert run.model.training
    with swa.in_place(run):
        assert same(buffers(run.model), buffers(expected))


def test_without_it_they_are_those_of_the_last_weights() -> None:
    kept = tiny_run(model=normed(), epochs=4, callbacks=[Swa(0.5, update_batch_norm=0)])
    plain = tiny_run(model=normed(), epochs=4)
    assert same(buffers(kept.model), buffers(plain.model))


@pytest.mark.parametrize("first", [True, False])
def test_frozen_statistics_do_not_change(first: bool) -> None:
    model = nn.Sequential(normed(), nn.BatchNorm1d(1))
    before = buffers(model[0])
    callbacks = [Swa(0.5), Freeze("0.1")] if first else [Freeze("0.1"), Swa(0.5)]
    tiny_run(model=model, epochs=4, callbacks=callbacks)
    assert same(buffers(model[0]), before)
    assert cast("nn.BatchNorm1d", model[1]).num_batches_tracked == 5  # those of the last pass
    assert model[0].training


def test_taking_them_disturbs_no_random_stream() -> None:
    def stream(batches: int | None) -> Tensor:
        tiny_run(model=network(), loader=shuffled(), epochs=4, seed=1, callbacks=[Swa(0.5, update_batch_norm=batches)])
        return torch.get_rng_state()

    assert torch.equal(stream(None), stream(0))


def test_a_loader_that_is_used_up_is_named_and_the_statistics_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = tiny_run(model=normed(), loader=iter(tiny_loader(9)), steps=9, callbacks=[Swa(0.5, every="1 step")])
    assert "the loader has no more batches for BatchNorm statistics" in caplog.text
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", run.model)[1]).num_batches_tracked == 9


def test_an_error_on_the_way_leaves_modes_and_momenta_as_they_were() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            raise ZeroDivisionError
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    trainer = tiny_trainer(model=normed(), epochs=4, compute_loss=compute_loss, callbacks=[Swa(0.5)])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit()
    assert "raised in Swa.at_end" in caught.value.__notes__[0]
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", trainer.model)[1]).momentum == 0.1
    assert trainer.model.training


# -- resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "at"), [(0.5, [4, 10, 13]), ("2 epochs", [11]), ("9 steps", [9, 19])])
def test_it_continues_to_the_same_bits_before_at_and_after_the_start(start: float | str, at: list[int]) -> None:
    def make(directory: Path) -> Trainer:
        rates: list[Callback] = [LearningRate(falling), Swa(start, "2 steps", lr=0.05, anneal_steps=4)]
        evaluate = Evaluate(shuffled(), weights="swa")
        return tiny_trainer(
            model=network(), loader=shuffled(), directory=directory, epochs=4, seed=1, callbacks=[*rates, evaluate]
        )

    prove_resume(make, at=at, in_process=True)


# -- what it needs ------------------------------------------------------------------------------------


def test_a_start_that_never_comes_is_named_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tiny_run(epochs=2, callbacks=[Swa("3 epochs", use_at_end=False)])
    assert "Swa never averages in this run: start is at epoch 3, and the run ends after 2 epochs" in caplog.text


def test_with_a_step_fn_swa_cannot_update_the_statistics() -> None:
    def step_fn(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model(batch[0]).square().mean()
        run.backward(loss)
        run.update()
        return loss

    with pytest.raises(ValueError, match=r"this run has a step_fn instead\. Give Swa\(update_batch_norm=0\)"):
        tiny_run(model=normed(), step_fn=step_fn, epochs=4, callbacks=[Swa(0.5)])
    run = tiny_run(model=normed(), step_fn=step_fn, epochs=4, callbacks=[Swa(0.5, update_batch_norm=0)])
    assert all(math.isfinite(value.sum()) for value in run.model.state_dict().values())


def test_the_plan_says_from_when_on() -> None:
    plan = str(tiny_trainer(epochs=8, callbacks=[Swa(), Swa("6 epochs", "10 steps", name="late")]).plan())
    assert "Swa (every epoch, after 0.75 of the run)" in plan
    assert "Swa(late) (every 10 steps, at epoch 6)" in plan
