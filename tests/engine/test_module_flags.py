"""Parameters that hooks freeze and modules that they put in evaluation mode are so after a resume as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Freeze
from cadenza.engine.session import session_of
from cadenza.testing import prove_resume, tiny_run, tiny_trainer


class Network(nn.Module):
    """Two layers with batch norm between them; the first can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(inputs)))
        return outputs


@on(Callback.on_step_end, at=3)
def freeze_the_first_layer(run: Run) -> None:
    model = run.driver.unwrap(run.model)
    assert isinstance(model, Network)
    model.first.requires_grad_(False)
    model.norm.eval()


@on(Callback.on_step_end, at=7)
def free_it_again(run: Run) -> None:
    model = run.driver.unwrap(run.model)
    assert isinstance(model, Network)
    model.first.requires_grad_(True)
    model.norm.train()


def trainer_of(*callbacks: Callback, freeze: tuple[str, ...] = ()) -> Callable[[Path], Trainer]:
    def make(directory: Path) -> Trainer:
        model = Network()
        for name in freeze:
            model.get_submodule(name).requires_grad_(False)
        return tiny_trainer(model=model, callbacks=callbacks, directory=directory, epochs=2, seed=1)

    return make


def flags(model: nn.Module) -> set[str]:
    """Return the names of all that is frozen or in evaluation mode."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozen | {name for name, module in model.named_modules() if not module.training}


FROZEN = {"first.weight", "first.bias", "norm"}


def test_what_a_hook_switched_off_stays_off_after_the_cut_until_a_hook_switches_it_on() -> None:
    prove_resume(trainer_of(freeze_the_first_layer, free_it_again), at=[2, 3, 5, 7, 8], in_process=True)


def test_what_a_hook_switched_on_is_on_after_the_cut() -> None:
    @on(Callback.on_step_end, at=3)
    def free(run: Run) -> None:
        run.model.get_submodule("first").requires_grad_(True)

    prove_resume(trainer_of(free, freeze=("first",)), at=[2, 4], in_process=True)


def test_it_is_there_after_the_second_resume_and_each_resume_tells(tmp_path: Path) -> None:
    trainers = []
    for steps in (4, 6, 8):
        trainer = trainer_of(freeze_the_first_layer, Checkpoint("1 step"))(tmp_path)
        trainer.max_steps = steps
        run = trainer.fit(resume="auto")
        trainers.append(trainer)
    assert flags(trainers[-1].model) == FROZEN
    assert "requires_grad of first.weight is False; requires_grad of first.bias is False; training of norm is False" in run.why(
        "flags restored"
    )


def test_the_same_model_that_goes_on_in_one_process_keeps_it_for_another(tmp_path: Path) -> None:
    trainer = trainer_of(freeze_the_first_layer, Checkpoint("1 step"))(tmp_path)
    for steps in (4, 6):
        trainer.max_steps = steps
        trainer.fit(resume="auto")
    fresh = trainer_of(Checkpoint("1 step"))(tmp_path)
    fresh.fit(resume="auto")
    assert flags(fresh.model) == FROZEN


@pytest.mark.parametrize(("until", "frozen"), [(None, set()), ("1 step", set()), ("8 steps", FROZEN)])
def test_what_freeze_holds_is_its_own_and_follows_from_its_present_arguments(
    until: str | None, frozen: set[str], tmp_path: Path
) -> None:
    run = trainer_of(Freeze(["first", "norm"], until="6 steps"), Checkpoint("4 steps"))(tmp_path)
    run.max_steps = 4
    run.fit()
    seen: list[set[str]] = []
    look = on(Callback.on_step_start)(lambda run: seen.append(flags(run.model)))
    freeze = [] if until is None else [Freeze(["first", "norm"], until=until)]
    trainer_of(*freeze, Checkpoint("4 steps"), look)(tmp_path).fit(resume="auto")
    assert seen[0] - {"norm.weight", "norm.bias"} == frozen


def test_a_run_in_which_no_hook_switches_anything_saves_and_tells_nothing(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[Checkpoint("1 step")], steps=2)
    assert session_of(run).module_flags.changed() == {}
    run = tiny_trainer(directory=tmp_path, callbacks=[Checkpoint("1 step")], steps=3).fit(resume="auto")
    assert not [decision for decision in run.decisions if decision.what == "flags restored"]
