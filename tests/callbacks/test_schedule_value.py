"""ScheduleValue: any attribute or key, by a schedule over the steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, ScheduleValue
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer


def values_in_steps(schedule: Any, *, steps: int = 6, **arguments: Any) -> list[Any]:
    """Return the value that each step had."""
    target, seen = SimpleNamespace(value=-1.0), list[Any]()
    look = on(Callback.on_step_start)(lambda run: seen.append(target.value))
    tiny_run(callbacks=[ScheduleValue(target, "value", schedule, **arguments), look], steps=steps)
    return seen


@pytest.mark.parametrize(
    ("schedule", "arguments", "values"),
    [
        (lambda step: step * 10, {}, [0, 10, 20, 30, 40, 50]),
        (lambda step, total: step / total, {"steps": 5}, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (lambda step: step, {"every": "2 steps"}, [0, 0, 2, 2, 4, 4]),
        (lambda step: step, {"every": "1 epoch"}, [0, 0, 0, 0, 0, 5]),
        ({0: 1.0, 4: 0.0}, {}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({2: 1, 4: 3}, {}, [1, 1, 1, 2, 3, 3]),  # the first one counts before its step too
        ({4: 0.0, 0: 1.0, 2: 3.0}, {}, [1.0, 2.0, 3.0, 1.5, 0.0, 0.0]),
        ({0: "warm", 3: "cold"}, {"between": "hold"}, ["warm", "warm", "warm", "cold", "cold", "cold"]),
        ({5: 7}, {}, [7] * 6),
    ],
)
def test_each_step_has_the_value_of_the_schedule(schedule: Any, arguments: dict[str, Any], values: list[Any]) -> None:
    assert values_in_steps(schedule, **arguments) == values


def test_the_last_value_stays_when_the_run_is_over() -> None:
    dropout = nn.Dropout(0.9)
    model = nn.Sequential(nn.Linear(1, 1), dropout)
    tiny_run(model=model, callbacks=[ScheduleValue(dropout, "p", {0: 0.5, 10: 0.0})], steps=5)
    assert dropout.p == 0.25


def test_the_target_may_be_found_by_a_function_of_the_run_and_may_be_a_mapping() -> None:
    schedule = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "weight_decay", {0: 0.0, 4: 0.4})
    group = tiny_run(callbacks=[schedule], steps=2).optimizers[0].param_groups[0]
    assert group["weight_decay"] == pytest.approx(0.2)


def test_a_module_is_a_target_though_it_can_be_called() -> None:
    model = nn.Linear(1, 1)
    model.strength = 0.0  # type: ignore[assignment]  # modules take any attribute
    tiny_run(model=model, callbacks=[ScheduleValue(model, "strength", lambda step: float(step))], steps=3)
    assert model.strength == 3.0


def test_a_value_that_is_a_tensor_is_filled_and_stays_the_same() -> None:
    model = nn.Linear(1, 1)
    strength = torch.tensor(0.0)
    model.register_buffer("strength", strength)
    tiny_run(model=model, callbacks=[ScheduleValue(model, "strength", {0: 0.0, 4: 1.0})], steps=2)
    assert model.strength is strength
    assert strength.item() == 0.5


def test_several_stand_in_one_list() -> None:
    target = SimpleNamespace(first=0, second=0)
    both = [ScheduleValue(target, "first", lambda step: step), ScheduleValue(target, "second", lambda step: -step)]
    tiny_run(callbacks=both, steps=3)
    assert (target.first, target.second) == (3, -3)


@pytest.mark.parametrize("every", ["1 step", "3 steps", "1 epoch"])
def test_a_run_that_continues_between_two_changes_has_the_same_bits(every: str) -> None:
    def make(directory: Path) -> Trainer:
        schedule = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "momentum", lambda step: step / 20, every=every)
        return tiny_trainer(callbacks=[schedule], directory=directory, steps=9, batches=4, seed=1)

    prove_resume(make, at=[1, 4, 5, 7], in_process=True)


def test_a_run_that_continues_sets_what_no_checkpoint_holds(tmp_path: Path) -> None:
    seen: list[float] = []

    def fit(steps: int, resume: Any) -> None:
        dropout = nn.Dropout(0.9)
        model = nn.Sequential(nn.Linear(1, 1), dropout)
        look = on(Callback.on_step_start)(lambda run: seen.append(dropout.p))
        callbacks = [ScheduleValue(dropout, "p", {0: 0.5, 5: 0.0}), look, Checkpoint()]
        tiny_trainer(model=model, callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume=resume)

    fit(2, False)
    fit(4, "auto")
    assert seen == pytest.approx([0.5, 0.4, 0.3, 0.2])


def test_what_the_target_does_not_have_is_an_error_before_the_first_step() -> None:
    reached: list[Run] = []
    look = on(Callback.on_step_start)(reached.append)
    with pytest.raises(AttributeError, match=r"cannot set 'pp': a Dropout has no such option\. Did you mean 'p'\?"):
        tiny_run(callbacks=[ScheduleValue(nn.Dropout(), "pp", {0: 0.5}), look])
    wrong = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "momemtum", {0: 0.5})
    with pytest.raises(AttributeError, match=r"a dict has no such option\. Did you mean 'momentum'\?"):
        tiny_run(callbacks=[wrong, look])
    assert not reached


def test_a_total_that_is_not_known_is_an_error() -> None:
    schedule = ScheduleValue(nn.Dropout(), "p", lambda step, total: step / total)
    with pytest.raises(ValueError, match="ScheduleValue with a function of the step and the total needs a run of known length"):
        tiny_run(callbacks=[schedule], loader=(batch for batch in tiny_loader()))


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        (0.5, {}, r"schedule must be a function of the step, or a mapping .*; got 0\.5"),
        ({}, {}, "schedule must hold at least one value"),
        ({0.5: 1.0}, {}, r"each key of schedule, a step, must be a whole number of at least 0; got 0\.5"),
        ({-1: 1.0}, {}, "whole number of at least 0; got -1"),
        ({0: "warm"}, {}, r"between='linear' needs numbers; got 'warm' at step 0\. Use between='hold'"),
        ({0: 1.0}, {"between": "cubic"}, "between must be 'linear' or 'hold'; got 'cubic'"),
        ({0: 1.0}, {"every": "2 stps"}, "unknown unit 'stps'"),
    ],
)
def test_wrong_schedules_are_errors(schedule: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ScheduleValue(nn.Dropout(), "p", schedule, **arguments)
