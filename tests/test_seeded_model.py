"""A model that the trainer makes under its seed, and the warning for one that was made without."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.testing import tiny_loader

SCRIPT = """
import sys, torch
from torch import nn
from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint

how, *directory = sys.argv[1:]
if how == "seeded":
    torch.manual_seed(3)
make = lambda: nn.Linear(1, 1)
model = make if how == "function" else make()
if how == "loaded":
    torch.nn.init.constant_(model.bias, 0.0)
    model.load_state_dict({"weight": torch.full((1, 1), 0.5), "bias": torch.zeros(1)})
trainer = Trainer(
    model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), [(torch.ones(2, 1), torch.zeros(2, 1))] * 3,
    supervised(nn.MSELoss()), max_steps=3, seed=1, progress=False, device="cpu",
    directory=directory[0] if directory else None, callbacks=[Checkpoint("1 step")] if directory else [],
)
print("in the plan" if "drawn before" in str(trainer.plan()) else "not in the plan")
trainer.fit(resume=bool(directory))
print([parameter.tolist() for parameter in trainer.model.parameters()])
"""


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)


def test_two_starts_with_a_function_end_with_the_same_weights() -> None:
    one, other = started("function"), started("function")
    assert one.stdout == other.stdout
    assert one.stdout.startswith("not in the plan")
    assert "drawn before" not in one.stderr


def test_weights_that_differ_from_start_to_start_are_named_in_the_plan_and_at_the_start() -> None:
    one, other = started("unseeded"), started("unseeded")
    assert one.stdout != other.stdout
    assert one.stdout.startswith("in the plan")
    assert one.stderr.count("the weights were drawn before seed=1 was set") == 1


@pytest.mark.parametrize("how", ["seeded", "loaded"])
def test_weights_that_were_seeded_or_loaded_are_not_named(how: str) -> None:
    done = started(how)
    assert done.stdout.startswith("not in the plan")
    assert "drawn before" not in done.stderr


def test_a_run_that_continues_takes_its_weights_from_the_checkpoint(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    assert "drawn before" in started("unseeded", directory).stderr
    again = started("unseeded", directory)
    assert "drawn before" not in again.stderr


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer_of(model: Any, seed: int | None = 1) -> Trainer:
    loss = supervised(nn.MSELoss())
    return Trainer(model, sgd, tiny_loader(), loss, seed=seed, progress=False, max_steps=2)


@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), lambda: nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))])
def test_a_function_is_called_under_the_seed_and_leaves_the_generators_alone(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    expected = make().state_dict()
    before = torch.get_rng_state()
    trainer = trainer_of(make)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: value.tolist() for name, value in trainer.model.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def test_without_a_seed_the_model_is_drawn_from_the_generators_as_they_are() -> None:
    torch.manual_seed(5)
    expected = nn.Linear(1, 1)
    torch.manual_seed(5)
    drawn = trainer_of(lambda: nn.Linear(1, 1), seed=None).model.state_dict()
    assert torch.equal(drawn["weight"], expected.weight)


def test_a_class_may_be_given_and_one_that_needs_arguments_says_who_called_it() -> None:
    class Net(nn.Linear):
        def __init__(self, width: int = 1) -> None:
            super().__init__(width, 1)

    assert isinstance(trainer_of(Net).model, Net)
    with pytest.raises(TypeError, match="missing 2 required positional arguments") as raised:
        trainer_of(nn.Linear)
    assert "Trainer called model=" in raised.value.__notes__[0]
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, or a function without arguments that makes one; got 3"):
        trainer_of(lambda: 3)


def test_the_seeds_of_users_are_not_taken_for_first_seeds_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    for seed in (0, 1, 42, 2**31):
        torch.manual_seed(seed)
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer_of(nn.Linear(1, 1)).fit()
    assert "drawn before" not in caplog.text
