"""The schedules: rates and states equal those of pytorch-accelerated, whose figures stand here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.compat.accelerated import TrainerPlaceholderValues
from cadenza.compat.accelerated.schedulers import (
    CosineLrScheduler,
    ScheduleError,
    SchedulerBase,
    StatefulSchedulerBase,
    WSDLrScheduler,
)
from cadenza.compat.accelerated.trainer import Trainer
from tests.compat.accelerated.parts import data, train, trainer_of
from tests.compat.accelerated.test_history import Rates


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def steps(scheduler: StatefulSchedulerBase, count: int) -> list[float]:
    """Return the rate of the first group before each of so many updates."""
    rates = []
    for _ in range(count):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def rates_of(create: Callable[[torch.optim.Optimizer], Any], updates: int, **more: Any) -> list[float]:
    """Return the rates that a training of one epoch uses."""
    seen = Rates()
    train(trainer_of(callbacks=[seen], lr=0.01), 1, data(updates), create_scheduler_fn=create, **more)
    return seen.seen


def test_the_first_two_updates_of_a_cosine_schedule_use_the_optimizers_rate() -> None:
    rates = rates_of(CosineLrScheduler.create_scheduler_fn(), 6)
    assert rates == pytest.approx([0.01, 0.01, 0.00933019, 0.00750025, 0.0050005, 0.00250075], abs=1e-8)


def test_each_group_has_its_own_rate_and_field() -> None:
    optimizer = optimizer_of(0.01, 0.002)
    scheduler = CosineLrScheduler(optimizer, 1, 4, k_decay=2, min_lr_ratio=0.1, num_cooldown_epochs=0.25)
    rates = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(4):
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert [one for one, _ in rates] == pytest.approx([0.01, 0.01, 0.00972862, 0.00628142, 0.001], abs=1e-8)
    assert [other for _, other in rates] == pytest.approx([one / 5 for one, _ in rates])


def test_after_a_warm_up_the_rates_of_the_original_are_an_option() -> None:
    class AsBefore(CosineLrScheduler):
        as_original = True

    settings = {"num_warmup_epochs": 1, "warmup_starting_lr": 0.002, "lr_min": 0.0}
    own = steps(CosineLrScheduler(optimizer_of(0.01), 5, 2, **settings), 11)
    original = steps(AsBefore(optimizer_of(0.01), 5, 2, **settings), 11)
    assert own[:5] == original[:5] == pytest.approx([0.002, 0.002, 0.006, 0.01, 0.00961940], abs=1e-8)
    assert own[8:] == pytest.approx([0.00308658, 0.00146447, 0.00038060], abs=1e-8)
    assert original[8:] == pytest.approx([0.00308658, 0.0, 0.0], abs=1e-8)
    ratio = steps(AsBefore(optimizer_of(1.0), 5, 2, num_warmup_epochs=2, warmup_starting_lr_ratio=0.5), 5)
    assert ratio == pytest.approx([1e-6, 0.5, 0.74999975, 0.9999995, 1.24999925])


def test_a_warm_up_may_be_longer_than_the_training() -> None:
    rates = steps(CosineLrScheduler(optimizer_of(0.01), 1, 3, num_warmup_epochs=2, warmup_starting_lr=0.0), 4)
    assert rates == pytest.approx([0.0, 0.0, 0.01 / 6, 0.02 / 6])


STATE = {
    "total_iterations": 6,
    "lr_min_ratio": None,
    "lr_min": 1e-06,
    "warmup_iterations": 0,
    "warmup_lr_init": 1e-06,
    "warmup_lr_ratio": None,
    "k_decay": 1.0,
    "num_cooldown_iterations": 0,
    "num_updates": 2,
}
"""A state that pytorch-accelerated wrote after three updates."""


def test_a_cosine_state_of_the_original_continues_and_ours_has_the_same_keys() -> None:
    whole = CosineLrScheduler(optimizer_of(0.01), 1, 6)
    rates = steps(whole, 3)
    assert whole.state_dict() == STATE
    assert list(whole.state_dict()) == list(STATE)
    rates += steps(whole, 3)
    continued = CosineLrScheduler(optimizer_of(0.01), 9, 9)
    continued.load_state_dict(STATE)
    assert steps(continued, 3)[1:] == rates[4:]


def test_a_state_with_the_names_of_an_earlier_cadenza_keeps_the_rates_of_its_training() -> None:
    earlier = {  # written after two updates: the counter was one ahead
        "param_group_field": "lr",
        "base_lr_values": [0.01],
        "_num_updates": 2,
        "total_updates": 6,
        "warmup_updates": 0,
        "decay_end": 6,
        "k_decay": 1.0,
        "lr_min": 1e-6,
        "min_lr_ratio": None,
        "warmup_starting_lr": 1e-6,
        "warmup_starting_lr_ratio": None,
    }
    scheduler = CosineLrScheduler(optimizer_of(0.01), 9, 9)
    scheduler.load_state_dict(earlier)
    assert scheduler.state_dict() == STATE
    assert steps(scheduler, 2)[1] == pytest.approx(0.0050005)  # after the rate 0.0075 of the last update


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_state_with_missing_or_unknown_keys_is_an_error_and_changes_nothing(kind: str) -> None:
    optimizer = optimizer_of(0.01)
    scheduler = CosineLrScheduler(optimizer, 1, 6) if kind == "cosine" else WSDLrScheduler(optimizer, total_steps=6)
    before = scheduler.state_dict()
    missing, unknown = {**before}, {**before, "gamma": 0.1}
    del missing["lr_min"]
    with pytest.raises(ScheduleError, match=r"lacks \['lr_min'\] and has the unknown keys \[\]"):
        scheduler.load_state_dict(missing)
    with pytest.raises(ScheduleError, match=r"lacks \[\] and has the unknown keys \['gamma'\]"):
        scheduler.load_state_dict(unknown)
    with pytest.raises(ScheduleError, match="lacks"):
        scheduler.load_state_dict({"_num_updates": 3})
    assert scheduler.state_dict() == before


def test_a_subclass_may_add_to_the_state() -> None:
    class Named(CosineLrScheduler):
        def __init__(self, *arguments: Any, label: str = "") -> None:
            super().__init__(*arguments)
            self.label = label

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "label": self.label}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.label = state_dict["label"]

    loaded = Named(optimizer_of(0.01), 1, 6)
    loaded.load_state_dict(Named(optimizer_of(0.01), 2, 6, label="first").state_dict())
    assert (loaded.label, loaded.total_iterations) == ("first", 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_num_epochs": 0}, "total_num_epochs must be positive; got 0"),
        ({"total_num_epochs": "3"}, "total_num_epochs must be a number; got '3'"),
        (
            {"total_num_epochs": TrainerPlaceholderValues.NUM_EPOCHS},
            "must be a number; .*Pass placeholders to create_scheduler_fn, not",
        ),
        ({"num_update_steps_per_epoch": 0}, "num_update_steps_per_epoch must be positive"),
        ({"lr_min": -1}, "lr_min must be at least 0; got -1"),
    ],
)
@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_a_wrong_length_is_an_error_that_the_original_raises_and_a_value_error(
    arguments: dict[str, Any], message: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=message):
        CosineLrScheduler(optimizer_of(0.01), **{"total_num_epochs": 1, "num_update_steps_per_epoch": 1, **arguments})


def test_a_schedule_of_ones_own_defines_its_state_and_counts_from_zero() -> None:
    class Halves(StatefulSchedulerBase):
        def get_updated_values(self, num_updates: int) -> list[float]:
            return [rate / 2**num_updates for rate in self.base_lr_values]

        def state_dict(self) -> dict[str, Any]:
            return {"num_updates": self._num_updates}

        def load_state_dict(self, state_dict: Any) -> None:
            self._num_updates = state_dict["num_updates"]

    assert rates_of(Halves, 4) == [0.01, 0.01, 0.005, 0.0025]
    first = Halves(optimizer_of(0.01))
    steps(first, 3)
    second = Halves(optimizer_of(0.01))
    second.load_state_dict(first.state_dict())
    assert steps(second, 2)[1] == 0.00125


def test_a_later_schedule_of_an_optimizer_starts_from_its_first_value() -> None:
    class Constant(SchedulerBase):
        def get_updated_values(self, num_updates: int) -> float:
            return 3.0

    optimizer = optimizer_of(0.01)
    Constant(optimizer).step_update(0)
    assert optimizer.param_groups[0]["lr"] == 3.0
    assert Constant(optimizer).base_lr_values == [0.01]
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_schedule_with_too_few_values_is_an_error() -> None:
    class One(SchedulerBase):
        def get_updated_values(self, num_updates: int) -> list[float]:
            return [0.1]

    with pytest.raises(ScheduleError, match="One must return one value for all groups or one for each of the 2 groups; got 1"):
        One(optimizer_of(0.01, 0.002)).step_update(0)


# -- WSD ------------------------------------------------------------------------------------------------------


def test_wsd_has_warm_up_a_stable_phase_and_a_decay() -> None:
    rates = steps(WSDLrScheduler(optimizer_of(0.01), total_steps=10, num_warmup_steps=2, decay_phase_ratio=0.4), 12)
    assert rates[:4] == pytest.approx([0.01, 1e-6, 0.0050005, 0.01])
    assert rates[3:8] == [0.01] * 5
    assert rates[8:] == pytest.approx([0.005000005, 0.002928939, 0.001339755, 1e-8])


def test_wsd_decays_in_inverse_proportion_if_asked_to() -> None:
    scheduler = WSDLrScheduler(
        optimizer_of(0.01), total_steps=10, decay_phase_ratio=0.4, lr_min=0.1, use_inverse_sqrt_decay=False
    )
    assert steps(scheduler, 12)[7:] == pytest.approx([0.01, 0.003076923, 0.001818182, 0.001290323, 0.001])


def test_wsd_has_a_decay_before_each_checkpoint() -> None:
    scheduler = WSDLrScheduler(optimizer_of(0.01), num_epochs=4, num_update_steps_per_epoch=10, num_checkpoints=3)
    rates = steps(scheduler, 42)
    assert scheduler.get_checkpoint_steps() == [10, 20, 40]
    assert scheduler.get_decay_info()[2] == {"period_start": 20, "period_end": 40, "decay_steps": 2, "pre_decay_step": 38}
    assert [step for step in range(1, 41) if rates[step] < rates[step - 1]] == [40]
    assert scheduler.get_phase_info(20)["period_end"] == 20
    assert scheduler.get_phase_info(21)["period_end"] == 40
    assert scheduler.get_phase_info(99)["period_end"] == 40
    assert (scheduler.get_current_step(), scheduler.get_current_phase_info()["period_start"]) == (41, 20)
    assert rates[41] == pytest.approx(1e-8)
    assert WSDLrScheduler(optimizer_of(0.01), total_steps=1000, num_checkpoints=2).get_checkpoint_steps() == [250, 500]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either total_steps, or num_epochs and num_update_steps_per_epoch; got None, None and None"),
        ({"total_steps": 4, "num_epochs": 2, "num_update_steps_per_epoch": 2}, "either total_steps, or num_epochs"),
        ({"total_steps": 0}, "total_steps must be positive; got 0"),
        ({"total_steps": "9"}, "total_steps must be a number; got '9'"),
        ({"total_steps": 9, "decay_phase_ratio": 1.5}, "from 0 to 1; got 1.5"),
        ({"total_steps": 9, "decay_phase_ratio": 0.4, "num_checkpoints": 2}, "at most 1/3 with several checkpoints; got 0.4"),
        ({"total_steps": 9, "num_checkpoints": 0}, "num_checkpoints must be at least 1"),
        ({"total_steps": 9, "lr_min": -0.1}, "lr_min must be at least 0"),
        ({"total_steps": 9, "lr_min": 0, "use_inverse_sqrt_decay": False}, "lr_min must be positive"),
        ({"total_steps": 9, "warmup_starting_lr": 1.0}, r"at most the largest learning rate, 0\.01; got 1\.0"),
    ],
)
def test_wrong_arguments_of_wsd_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        WSDLrScheduler(optimizer_of(0.01), **arguments)


def test_a_state_of_wsd_contains_its_counter() -> None:
    whole = WSDLrScheduler(optimizer_of(0.01), total_steps=10, decay_phase_ratio=0.5)
    steps(whole, 8)
    again = WSDLrScheduler(optimizer_of(0.01), total_steps=99)
    again.load_state_dict(whole.state_dict())
    assert again.state_dict() == whole.state_dict()
    assert again.get_current_step() == 7
    assert steps(again, 3)[1:] == steps(whole, 3)[1:]


def test_a_continuation_of_wsd_begins_a_stable_phase_of_the_new_length_without_a_warm_up() -> None:
    first = WSDLrScheduler(optimizer_of(0.01), total_steps=20, num_warmup_steps=5, decay_phase_ratio=0.2)
    steps(first, 16)
    then = WSDLrScheduler(first.optimizer, total_steps=10, decay_phase_ratio=0.5, is_continuation_from_checkpoint=True)
    then.load_state_dict(first.state_dict())
    assert (then.get_current_step(), then.total_steps, then.decay_phase_ratio) == (-1, 10, 0.2)
    assert then.get_checkpoint_steps() == [10]
    rates = steps(then, 12)
    assert rates[:10] == [0.01] * 10
    assert rates[11] == pytest.approx(1e-8)


def test_an_interrupted_continuation_of_wsd_is_resumed_and_not_begun_anew() -> None:
    def continuation() -> WSDLrScheduler:
        return WSDLrScheduler(optimizer_of(0.01), total_steps=10, is_continuation_from_checkpoint=True)

    first = WSDLrScheduler(optimizer_of(0.01), total_steps=20)
    then = continuation()
    with pytest.raises(ScheduleError, match="cannot be resumed with is_continuation_from_checkpoint=True"):
        then.resume(first.state_dict())
    then.load_state_dict(first.state_dict())
    steps(then, 4)
    resumed, anew = continuation(), continuation()
    resumed.resume(then.state_dict())
    anew.load_state_dict(then.state_dict())
    assert (resumed.get_current_step(), anew.get_current_step()) == (3, -1)


def test_a_wsd_state_of_the_original_has_no_counter_so_it_only_begins_a_new_training() -> None:
    state = WSDLrScheduler(optimizer_of(0.01), total_steps=20).state_dict()
    del state["num_updates"]
    with pytest.raises(ScheduleError, match=r"no 'num_updates'.*is_continuation_from_checkpoint=True"):
        WSDLrScheduler(optimizer_of(0.01), total_steps=20).load_state_dict(state)
    continued = WSDLrScheduler(optimizer_of(0.01), total_steps=8, is_continuation_from_checkpoint=True)
    continued.load_state_dict(state)
    assert continued.get_checkpoint_steps() == [8]


def test_the_lengths_of_a_wsd_schedule_are_those_of_the_run() -> None:
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5, decay_phase_ratio=0.25)
    trainer = trainer_of(lr=0.01)
    train(trainer, 2, data(8), create_scheduler_fn=create, gradient_accumulation_steps=2)
    assert (trainer.scheduler.total_steps, trainer.scheduler.num_warmup_steps) == (8, 2)
    twice = WSDLrScheduler.create_scheduler_fn(TrainerPlaceholderValues.NUM_EPOCHS * 2, 50)
    train(trainer, 2, data(8), create_scheduler_fn=twice)
    assert (trainer.scheduler.total_steps, trainer.scheduler.num_warmup_steps) == (200, 2)


@pytest.mark.parametrize("scheduler", [CosineLrScheduler, WSDLrScheduler])
def test_a_checkpoint_of_the_trainer_restores_the_schedule(scheduler: Any, tmp_path: Path) -> None:
    def trained(epochs: int) -> Trainer:
        trainer = trainer_of(lr=0.01)
        train(trainer, epochs, data(5), create_scheduler_fn=scheduler.create_scheduler_fn(2))
        return trainer

    half = trained(1)
    half.save_checkpoint(tmp_path / "half.pt")
    other = trained(2)
    other.load_checkpoint(tmp_path / "half.pt")
    assert other.scheduler.state_dict() == half.scheduler.state_dict()
    assert other.scheduler.state_dict()["num_updates"] == 4
