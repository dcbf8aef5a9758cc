"""Schedules of timm in `LearningRate`: the rates of timm's own loop, exact resumes, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.plateau_lr import PlateauLRScheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.scheduler.step_lr import StepLRScheduler
from timm.scheduler.tanh_lr import TanhLRScheduler
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, LearningRate, LogTraining
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer


def by_step(optimizer: Any, total: int) -> CosineLRScheduler:
    return CosineLRScheduler(optimizer, t_initial=total, warmup_t=2, t_in_epochs=False, noise_range_t=3, noise_seed=7)


def by_epoch(optimizer: Any) -> TanhLRScheduler:
    return TanhLRScheduler(optimizer, t_initial=4, warmup_t=1)


def rates_of_timm(schedule: Callable[[Any], Any], epochs: int, updates: int) -> list[float]:
    """Return the rate of each update in the loop that timm's documentation describes."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    one, rates, count = schedule(optimizer), [], 0
    for epoch in range(epochs):
        for _ in range(updates):
            rates.append(optimizer.param_groups[0]["lr"])
            count += 1
            one.step_update(num_updates=count)
        one.step(epoch + 1)
    return rates


def trainer(rate: LearningRate, epochs: int = 4, **arguments: Any) -> Trainer:
    return tiny_trainer(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loader=tiny_loader(3),
        epochs=epochs,
        callbacks=[rate, LogTraining("1 step", throughput=False), *arguments.pop("callbacks", ())],
        **arguments,
    )


@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        (LearningRate(by_step), lambda optimizer: by_step(optimizer, 12)),
        (LearningRate(by_epoch, per="epoch"), by_epoch),
        (
            LearningRate(lambda optimizer: create_scheduler_v2(optimizer, "cosine", num_epochs=4)[0], per="epoch"),
            lambda optimizer: create_scheduler_v2(optimizer, "cosine", num_epochs=4)[0],
        ),
    ],
)
def test_the_rates_are_those_of_the_loop_of_timm(rate: LearningRate, schedule: Callable[[Any], Any]) -> None:
    rates = []

    @on(Callback.on_before_optimizer_step)
    def see(run: Run) -> None:
        rates.append(run.optimizers[0].param_groups[0]["lr"])

    trainer(rate, callbacks=[see]).fit()
    assert rates == rates_of_timm(schedule, 4, 3)
    assert len(set(rates)) > 3


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_run_that_continues_has_the_rates_and_weights_of_one_that_does_not_stop(per: str, tmp_path: Path) -> None:
    def make(name: str, **arguments: Any) -> Trainer:
        rate = LearningRate(by_step) if per == "step" else LearningRate(by_epoch, per="epoch")
        return trainer(rate, directory=tmp_path / name, callbacks=[Checkpoint("2 steps"), *arguments.pop("callbacks", ())])

    @on(Callback.on_batch_start, at=8)
    def cut(run: Run, batch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("resumed", callbacks=[cut]).fit(resume="auto")
    resumed, whole = make("resumed"), make("whole")
    run = resumed.fit(resume="auto")
    assert run.progress.origin.step == 6
    assert run.history["train/lr"] == whole.fit().history["train/lr"]
    assert torch.equal(resumed.model.state_dict()["weight"], whole.model.state_dict()["weight"])


def test_a_schedule_that_is_stretched_continues_with_the_rates_of_the_longer_run(tmp_path: Path) -> None:
    def stretched() -> LearningRate:
        return LearningRate(by_step, stretch=True)

    trainer(stretched(), 2, directory=tmp_path, callbacks=[Checkpoint()]).fit(resume="auto")
    longer = trainer(stretched(), 4, directory=tmp_path, callbacks=[Checkpoint()]).fit(resume="auto")
    assert longer.history["train/lr"][6:] == trainer(LearningRate(by_step)).fit().history["train/lr"][6:]


def test_an_instance_is_accepted_as_a_scheduler_of_torch_is() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = LearningRate(StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5), per="epoch")
    tiny_trainer(model=model, optimizer=optimizer, epochs=2, callbacks=[rate]).fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")
def test_other_units_a_plateau_and_a_schedule_in_the_list_of_callbacks_are_errors_that_say_what_to_write() -> None:
    units = (
        r"TanhLRScheduler counts epochs, but LearningRate steps it after each step\. Give LearningRate\(\.\.\., per='epoch'\)"
    )
    with pytest.raises(ValueError, match=units):
        trainer(LearningRate(by_epoch)).fit()
    with pytest.raises(ValueError, match=r"Use LearningRate.*ReduceLROnPlateau"):
        trainer(LearningRate(lambda optimizer: PlateauLRScheduler(optimizer), per="epoch")).fit()
    schedule = StepLRScheduler(torch.optim.SGD(tiny_model().parameters(), lr=0.1), decay_t=1)
    with pytest.raises(TypeError, match=r"StepLRScheduler\. Write LearningRate"):
        tiny_trainer(callbacks=[schedule])  # type: ignore[list-item]
