"""A22: schedules, whose rates and states equal those of pytorch-accelerated; placeholders; and checkpoints around decays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from cadenza.compat.accelerated import schedulers
from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback, WSDCheckpointCallback
from cadenza.compat.accelerated.placeholders import replace_trainer_placeholder_values
from cadenza.compat.accelerated.schedulers import CosineLrScheduler, ScheduleError, StatefulSchedulerBase, WSDLrScheduler
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues, TrainerWithTimmScheduler
from tests.compat.accelerated.parts import Rates, data, names, noting_trainer, train, trainer_of


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


def rates_of(create: Callable[[torch.optim.Optimizer], Any], updates: int, epochs: int = 1, lr: float = 0.01) -> list[float]:
    """Return the rates that a training uses."""
    seen = Rates()
    train(trainer_of(callbacks=[seen], lr=lr), epochs, data(updates), create_scheduler_fn=create)
    return seen.seen


def test_a22_a_scheduler_is_stepped_after_each_update_and_one_of_timm_also_after_epochs() -> None:
    rates = Rates()
    trainer, noting = noting_trainer(rates, lr=1.0)
    tenth = partial(ExponentialLR, gamma=0.1)
    train(trainer, 1, data(3), create_scheduler_fn=tenth)
    train(trainer, 1, data(6), create_scheduler_fn=tenth, gradient_accumulation_steps=2)
    assert rates.seen == pytest.approx([1.0, 0.1, 0.01, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    noting.log.clear()
    train(trainer, 1, data(2))
    assert trainer.scheduler is None
    assert "[scheduler_step]" not in noting.log

    class Told:
        def __init__(self, optimizer: Any) -> None:
            self.said: list[str] = []

        def step_update(self, num_updates: int) -> None:
            self.said.append(f"update {num_updates}")

        def step(self, epoch: int) -> None:
            self.said.append(f"epoch {epoch}")

    timm = train(trainer_of(TrainerWithTimmScheduler), 2, data(2), data(1), create_scheduler_fn=Told)
    assert timm.scheduler.said == ["update 1", "update 2", "epoch 1", "update 3", "update 4", "epoch 2"]


def test_placeholders_are_values_of_the_run_or_of_any_object_with_its_settings() -> None:
    class Keep:
        def __init__(self, optimizer: Any, **values: Any) -> None:
            self.values = values

        def step(self) -> None:
            pass

    values = TrainerPlaceholderValues
    lengths = {"train": values.TRAIN_DATALOADER_LEN - 1, "evaluation": values.EVAL_DATALOADER_LEN}
    create = partial(
        Keep,
        epochs=values.NUM_EPOCHS,
        updates=values.NUM_UPDATE_STEPS_PER_EPOCH * 2 + 1,
        both=values.NUM_EPOCHS * values.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        **lengths,
    )
    trainer = train(trainer_of(), 3, data(5), data(4), gradient_accumulation_steps=2, create_scheduler_fn=create)
    assert trainer.scheduler.values == {"epochs": 3, "updates": 7, "both": 9, "train": 4, "evaluation": 4}
    with pytest.raises(ValueError, match="EVAL_DATALOADER_LEN"):
        train(trainer, 3, data(5), create_scheduler_fn=create)
    config = SimpleNamespace(num_epochs=5, num_update_steps_per_epoch=10, num_local_update_steps_per_epoch=10, num_processes=1)
    other = SimpleNamespace(run_config=config, _train_dataloader=range(20), _eval_dataloader=range(7))
    made = replace_trainer_placeholder_values(other, partial(dict, epochs=values.NUM_EPOCHS * 2, **lengths))()
    assert made == {"epochs": 10, "train": 19, "evaluation": 7}
    assert replace_trainer_placeholder_values(other, dict) is dict
    assert "NUM_EPOCHS" in values.placeholder_set()


# -- cosine -----------------------------------------------------------------------------------------------------


def test_the_cosine_schedule_has_warm_up_decay_and_cool_down() -> None:
    rates = rates_of(CosineLrScheduler.create_scheduler_fn(), 6)  # the first two updates use the optimizer's rate
    assert rates == pytest.approx([0.01, 0.01, 0.00933019, 0.00750025, 0.0050005, 0.00250075], abs=1e-8)
    create = CosineLrScheduler.create_scheduler_fn(
        num_warmup_epochs=2, num_cooldown_epochs=1, lr_min=0.1, warmup_starting_lr=0.2
    )
    rates = rates_of(create, 10, epochs=10, lr=1.0)
    assert rates[:2] == [0.2, 0.2]  # the counter of the schedule starts at -1
    assert rates[11] == pytest.approx(0.6)
    assert rates[21] == pytest.approx(1.0)
    assert rates[56] == pytest.approx(0.55)  # half of the way from 20 to 90
    assert all(one > other for one, other in pairwise(rates[21:91]))
    assert rates[91:] == [0.1] * 9
    rates = steps(CosineLrScheduler(optimizer_of(0.01), 1, 3, num_warmup_epochs=2, warmup_starting_lr=0.0), 4)
    assert rates == pytest.approx([0.0, 0.0, 0.01 / 6, 0.02 / 6])  # longer than the training


def test_warm_up_may_start_at_a_fraction_of_the_rate_and_each_group_has_its_own_rate() -> None:
    optimizer = optimizer_of(2.0)
    scheduler = CosineLrScheduler(optimizer, 10, 1, num_warmup_epochs=5, warmup_starting_lr_ratio=0.1, min_lr_ratio=0.05)
    rates = [scheduler.get_updated_values(update)[0] for update in range(12)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[5] == pytest.approx(2.0)
    assert rates[11] == pytest.approx(0.1)
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[0])
    groups = optimizer_of(0.01, 0.002)
    scheduler = CosineLrScheduler(groups, 1, 4, k_decay=2, min_lr_ratio=0.1, num_cooldown_epochs=0.25)
    for rate in (0.01, 0.01, 0.00972862, 0.00628142, 0.001):
        assert [group["lr"] for group in groups.param_groups] == pytest.approx([rate, rate / 5], abs=1e-8)
        scheduler.step()


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


STATE: dict[str, Any] = {"total_iterations": 6, "lr_min_ratio": None, "lr_min": 1e-06}
STATE |= {"warmup_iterations": 0, "warmup_lr_init": 1e-06, "warmup_lr_ratio": None}
STATE |= {"k_decay": 1.0, "num_cooldown_iterations": 0, "num_updates": 2}
"""A state that pytorch-accelerated wrote after three updates."""


def test_cosine_states_of_the_original_and_of_an_earlier_cadenza_continue_and_ours_has_the_originals_keys() -> None:
    whole = CosineLrScheduler(optimizer_of(0.01), 1, 6)
    rates = steps(whole, 3)
    assert whole.state_dict() == STATE
    assert list(whole.state_dict()) == list(STATE)
    rates += steps(whole, 3)
    continued = CosineLrScheduler(optimizer_of(0.01), 9, 9)
    continued.load_state_dict(STATE)
    assert steps(continued, 3)[1:] == rates[4:]
    # The earlier state was written after two updates: the counter was one ahead.
    earlier: dict[str, Any] = {"param_group_field": "lr", "base_lr_values": [0.01], "_num_updates": 2}
    earlier |= {"total_updates": 6, "warmup_updates": 0, "decay_end": 6}
    earlier |= {"k_decay": 1.0, "lr_min": 1e-6, "min_lr_ratio": None}
    earlier |= {"warmup_starting_lr": 1e-6, "warmup_starting_lr_ratio": None}
    scheduler = CosineLrScheduler(optimizer_of(0.01), 9, 9)
    scheduler.load_state_dict(earlier)
    assert scheduler.state_dict() == STATE
    assert steps(scheduler, 2)[1] == pytest.approx(0.0050005)  # after the rate 0.0075 of the last update


NUM_EPOCHS = TrainerPlaceholderValues.NUM_EPOCHS


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
        ({"total_num_epochs": NUM_EPOCHS}, "must be a number; .*Pass placeholders to create_scheduler_fn, not"),
        ({"num_update_steps_per_epoch": 0}, "num_update_steps_per_epoch must be positive"),
        ({"lr_min": -1}, "lr_min must be at least 0; got -1"),
    ],
)
@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_a_wrong_length_is_the_originals_error_and_a_value_error(arguments: Any, message: str, kind: type[Exception]) -> None:
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
    first, second = Halves(optimizer_of(0.01)), Halves(optimizer_of(0.01))
    steps(first, 3)
    second.load_state_dict(first.state_dict())
    assert steps(second, 2)[1] == 0.00125


def test_a_schedule_may_set_another_field_of_some_groups_and_starts_from_its_first_value() -> None:
    class Momentum(schedulers.SchedulerBase):
        def get_updated_values(self, num_updates: int) -> Any:
            return None if num_updates == 3 else [num_updates / 10]

    optimizer = torch.optim.SGD(trainer_of().model.parameters(), lr=1.0, momentum=0.9)
    scheduler = Momentum(optimizer, param_group_field="momentum")
    scheduler.step_update(2)
    scheduler.step_update(3)
    assert optimizer.param_groups[0]["momentum"] == 0.2
    assert optimizer.param_groups[0]["initial_momentum"] == 0.9
    assert Momentum(optimizer, param_group_field="momentum").base_lr_values == [0.9]
    assert optimizer.param_groups[0]["momentum"] == 0.9
    with pytest.raises(KeyError, match="beta"):
        Momentum(optimizer, param_group_field="beta")
    said = "Momentum must return one value for all groups or one for each of the 2 groups; got 1"
    with pytest.raises(ScheduleError, match=said):
        Momentum(optimizer_of(0.01, 0.002)).step_update(0)


# -- WSD ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("settings", "first", "last"),
    [
        ({"num_warmup_steps": 2}, [0.01, 1e-6, 0.0050005, *[0.01] * 5], [0.005000005, 0.002928939, 0.001339755, 1e-8]),
        ({"lr_min": 0.1, "use_inverse_sqrt_decay": False}, [0.01] * 8, [0.003076923, 0.001818182, 0.001290323, 0.001]),
    ],
    ids=["inverse square root", "inverse proportion"],
)
def test_wsd_has_warm_up_a_stable_phase_and_a_decay(settings: Any, first: list[float], last: list[float]) -> None:
    scheduler = WSDLrScheduler(optimizer_of(0.01), total_steps=10, decay_phase_ratio=0.4, **settings)
    assert steps(scheduler, 12) == pytest.approx([*first, *last])


def test_a_state_of_wsd_continues_or_begins_a_stable_phase_of_a_new_length_without_a_warm_up() -> None:
    whole = WSDLrScheduler(optimizer_of(0.01), total_steps=10, decay_phase_ratio=0.5)
    steps(whole, 8)
    again = WSDLrScheduler(optimizer_of(0.01), total_steps=99)
    again.load_state_dict(whole.state_dict())
    assert again.state_dict() == whole.state_dict()
    assert again.get_current_step() == 7
    assert steps(again, 3)[1:] == steps(whole, 3)[1:]
    first = WSDLrScheduler(optimizer_of(0.01), total_steps=20, num_warmup_steps=5, decay_phase_ratio=0.2)
    steps(first, 16)
    then = WSDLrScheduler(first.optimizer, total_steps=10, decay_phase_ratio=0.5, is_continuation_from_checkpoint=True)
    then.load_state_dict(first.state_dict())
    assert (then.get_current_step(), then.total_steps, then.decay_phase_ratio) == (-1, 10, 0.2)
    assert then.get_checkpoint_steps() == [10]
    rates = steps(then, 12)
    assert rates[:10] == [0.01] * 10
    assert rates[11] == pytest.approx(1e-8)


def test_an_interrupted_continuation_of_wsd_is_resumed_but_a_state_without_counter_begins_a_training() -> None:
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
    state = WSDLrScheduler(optimizer_of(0.01), total_steps=20).state_dict()
    del state["num_updates"]
    with pytest.raises(ScheduleError, match=r"no 'num_updates'.*is_continuation_from_checkpoint=True"):
        WSDLrScheduler(optimizer_of(0.01), total_steps=20).load_state_dict(state)
    continued = WSDLrScheduler(optimizer_of(0.01), total_steps=8, is_continuation_from_checkpoint=True)
    continued.load_state_dict(state)
    assert continued.get_checkpoint_steps() == [8]


def test_the_lengths_of_a_wsd_schedule_are_those_of_the_run() -> None:
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5, decay_phase_ratio=0.25)
    trainer = train(trainer_of(lr=0.01), 2, data(8), create_scheduler_fn=create, gradient_accumulation_steps=2)
    assert (trainer.scheduler.total_steps, trainer.scheduler.num_warmup_steps) == (8, 2)
    twice = WSDLrScheduler.create_scheduler_fn(NUM_EPOCHS * 2, 50)
    train(trainer, 2, data(8), create_scheduler_fn=twice)
    assert (trainer.scheduler.total_steps, trainer.scheduler.num_warmup_steps) == (200, 2)


@pytest.mark.parametrize("scheduler", [CosineLrScheduler, WSDLrScheduler])
def test_a_checkpoint_of_the_trainer_restores_the_schedule(scheduler: Any, tmp_path: Path) -> None:
    half, other = (
        train(trainer_of(lr=0.01), epochs, data(5), create_scheduler_fn=scheduler.create_scheduler_fn(2)) for epochs in (1, 2)
    )
    half.save_checkpoint(tmp_path / "half.pt")
    other.load_checkpoint(tmp_path / "half.pt")
    assert other.scheduler.state_dict() == half.scheduler.state_dict()
    assert other.scheduler.state_dict()["num_updates"] == 4


# -- checkpoints around the decays of WSD ------------------------------------------------------------------------

QUARTER = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25)
AGAIN = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25, is_continuation_from_checkpoint=True)


class Weights(TrainerCallback):
    """Records the weight before each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen.append(trainer.get_model().state_dict()["weight"].item())


def trained(epochs: int, *callbacks: TrainerCallback, batches: int = 5, create: Any = QUARTER, **more: Any) -> Trainer:
    return train(trainer_of(callbacks=callbacks, lr=0.01), epochs, data(batches), create_scheduler_fn=create, **more)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_state_is_saved_before_the_decay_and_a_file_after_it(accumulate: int, tmp_path: Path) -> None:
    weights, save = Weights(), WSDCheckpointCallback(tmp_path)
    trainer = trained(4, save, weights, gradient_accumulation_steps=accumulate, batches=5 * accumulate)
    assert names(tmp_path) == ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"]
    content = torch.load(tmp_path / "checkpoint_20_wsd_post_decay.pt")
    facts = {name: content[name] for name in ("step", "checkpoint_type", "total_steps", "decay_fraction")}
    assert facts == {"step": 20, "checkpoint_type": "wsd_post_decay", "total_steps": 20, "decay_fraction": 0.25}
    assert content["model_state_dict"]["weight"] == trainer.model.state_dict()["weight"]
    assert content["scheduler_state_dict"]["num_updates"] == 19
    assert "optimizer_state_dict" in content
    fresh = trained(1)
    saved = fresh.load_training_state(tmp_path / "checkpoint_15_wsd_pre_decay")
    assert (saved["step"], saved["checkpoint_type"], saved["decay_fraction"]) == (15, "wsd_pre_decay", 0.25)
    assert fresh.model.state_dict()["weight"].item() == weights.seen[15 * accumulate]  # after 15 updates
    assert fresh.scheduler.get_current_step() == 14


def test_each_of_several_decays_has_its_checkpoints_and_one_may_take_the_whole_training(tmp_path: Path) -> None:
    create = WSDLrScheduler.create_scheduler_fn(num_checkpoints=3)
    save = WSDCheckpointCallback(tmp_path, save_optimizer=False, save_scheduler=False)
    trained(4, save, batches=20, create=create)
    pre, post = (f"checkpoint_{step}_wsd_pre_decay" for step in (18, 38, 76)), (20, 40, 80)
    assert names(tmp_path) == sorted([*pre, *(f"checkpoint_{step}_wsd_post_decay.pt" for step in post)])
    assert save.checkpoint_steps == {*post}
    content = torch.load(tmp_path / "checkpoint_40_wsd_post_decay.pt")
    assert not {"optimizer_state_dict", "scheduler_state_dict"} & content.keys()
    whole, again = Weights(), Weights()
    create = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=1.0)
    folder = tmp_path / "one"
    trained(1, WSDCheckpointCallback(folder), whole, create=create)
    assert names(folder) == ["checkpoint_0_wsd_pre_decay", "checkpoint_5_wsd_post_decay.pt"]
    trained(1, WSDCheckpointCallback(folder), again, create=create, resume_from=folder / "checkpoint_0_wsd_pre_decay")
    assert again.seen == whole.seen


@pytest.mark.parametrize("name", ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"])
def test_a_training_begins_at_a_checkpoint_with_a_stable_phase_or_continues_inside_the_decay(name: str, tmp_path: Path) -> None:
    first, whole = Weights(), Rates()
    trained(4, WSDCheckpointCallback(tmp_path / "first"), first, whole)
    checkpoint = tmp_path / "first" / name
    rates, weights = Rates(), Weights()
    save = WSDCheckpointCallback(tmp_path / "then", initial_checkpoint=checkpoint)
    trainer = trained(4, save, rates, weights, create=AGAIN)
    end = torch.load(tmp_path / "first" / "checkpoint_20_wsd_post_decay.pt")["model_state_dict"]["weight"].item()
    assert weights.seen[0] == (first.seen[15] if name.endswith("pre_decay") else end)
    assert rates.seen[1:16] == [0.01] * 15
    assert rates.seen[17] < 0.01
    assert names(tmp_path / "then") == ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"]
    assert trainer.run_history.current_epoch == 5
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    if name.endswith("pre_decay"):
        rest, inside = Rates(), WSDCheckpointCallback(tmp_path / "first", initial_checkpoint=checkpoint)
        trained(1, inside, rest)  # without is_continuation_from_checkpoint
        assert rest.seen == whole.seen[15:]
        assert inside.last_checkpoint_step == 20
        trained(4, WSDCheckpointCallback(tmp_path / "first", initial_checkpoint=checkpoint), create=AGAIN)  # replaces the files
        assert len(names(checkpoint)) == 1
        assert trained(1, create=AGAIN).load_training_state(checkpoint)["step"] == 15


@pytest.mark.parametrize("name", ["step_7", "step_17"])
@pytest.mark.parametrize("create", [QUARTER, AGAIN])
def test_a_training_that_was_killed_resumes_inside_a_phase(name: str, create: Any, tmp_path: Path) -> None:
    trained(4, WSDCheckpointCallback(tmp_path / "start"))
    first = tmp_path / "start" / "checkpoint_15_wsd_pre_decay"

    def once(folder: str, *more: TrainerCallback, **arguments: Any) -> tuple[list[float], Any]:
        rates = Rates()
        save = WSDCheckpointCallback(tmp_path / folder, initial_checkpoint=None if create is QUARTER else first)
        trainer = trained(4, save, rates, *more, create=create, **arguments)
        return rates.seen, [trainer.model.state_dict()["weight"].item(), trainer.scheduler.state_dict(), save.state_dict()]

    rates, whole = once("whole", SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1))
    rest, continued = once("rest", resume_from=tmp_path / "states" / name)
    assert continued == whole
    assert rest == rates[-len(rest) :]
    missing = {"checkpoint_15_wsd_pre_decay"} if name == "step_17" else set()
    assert set(names(tmp_path / "rest")) == set(names(tmp_path / "whole")) - missing


def test_no_checkpoint_steps_is_an_error_and_a_missing_file_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = r"needs a scheduler with get_checkpoint_steps; got NoneType\. Use create_scheduler_fn"
    with pytest.raises(ValueError, match=said):
        trained(1, WSDCheckpointCallback(tmp_path), create=None)
    trained(1, WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / "nowhere"))
    assert "nowhere' does not exist, so the training starts without it" in caplog.text
