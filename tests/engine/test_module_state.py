"""Buffers that a forward pass changes, and flags that hooks set: kept over a trial, a batch left out, and a resume."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Capsule, Checkpoint, Freeze, Recover
from cadenza.engine.session import session_of
from cadenza.engine.statistics import Statistics
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel import replay_capsule


class Replacing(nn.Module):
    """A layer that puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.running_mean: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.running_mean


class Counting(nn.Module):
    """A layer with a buffer that is no statistic. The second writes past the version counter, as some quantizers do."""

    def __init__(self, past: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.count: Tensor
        self.past = past

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            count = self.count.data if self.past else self.count
            count.add_(inputs.detach().abs().mean(0))
        return inputs * (1 + self.count / 10)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "replaces": Replacing,
    "counts": Counting,
    "counts past versions": lambda: Counting(past=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(2),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2), MAKERS[kind](), nn.Linear(2, 1))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_capsule_holds_all_buffers_of_before_the_step_and_repeats_it(kind: str, tmp_path: Path) -> None:
    losses: list[float] = []

    @on(Callback.on_before_backward, when=lambda run: run.progress.step == 4)
    def look(run: Run, outputs: MutableMapping[str, Any]) -> None:
        losses.append(outputs["loss"].item())
        raise ArithmeticError

    trainer = tiny_trainer(model=made(kind), directory=tmp_path, batches=6, callbacks=[look, Capsule()])
    with pytest.raises(ArithmeticError):
        trainer.fit()
    again = replay_capsule(tiny_trainer(model=made(kind)), tmp_path)
    assert again.exact
    assert again.losses == losses


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_that_is_left_out_changes_no_buffer(kind: str, tmp_path: Path) -> None:
    loader = tiny_loader(8)
    loader[6][0][1] = float("nan")
    callbacks = [Recover(), Checkpoint("2 steps")]
    run = tiny_trainer(model=made(kind), loader=loader, directory=tmp_path, callbacks=callbacks).fit()
    assert all(one.isfinite().all() for one in run.model.state_dict().values())
    assert len([one for one in run.decisions if one.what == "batch left out"]) == 1


def test_a_buffer_that_changes_late_is_noticed_and_one_that_cannot_be_set_is_left_alone() -> None:
    model = made("counts")
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    statistics = Statistics(model)
    for _ in range(3):
        statistics.keep()
    assert not statistics.copies
    model(torch.rand(4, 1))
    statistics.keep()
    before = model.get_buffer("1.count").clone()
    model(torch.rand(4, 1))
    statistics.restore()
    assert torch.equal(model.get_buffer("1.count"), before)


class Network(nn.Module):
    """Two layers with batch norm between them; the first can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(inputs)))
        return outputs


def switch(run: Run, *, on: bool) -> None:
    model = run.driver.unwrap(run.model)
    assert isinstance(model, Network)
    model.first.requires_grad_(on)
    model.norm.train(on)


@on(Callback.on_step_end, at=3)
def freeze_the_first_layer(run: Run) -> None:
    switch(run, on=False)


@on(Callback.on_step_end, at=7)
def free_it_again(run: Run) -> None:
    switch(run, on=True)


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


def test_what_a_hook_switched_off_or_on_stays_so_after_the_cut_until_a_hook_switches_it_back() -> None:
    prove_resume(trainer_of(freeze_the_first_layer, free_it_again), at=[3, 5, 7], in_process=True)
    free = on(Callback.on_step_end, at=3)(lambda run: run.model.get_submodule("first").requires_grad_(True))
    prove_resume(trainer_of(free, freeze=("first",)), at=[4], in_process=True)


@pytest.mark.parametrize("one_model", [False, True], ids=["in each process anew", "one model that goes on"])
def test_it_is_there_after_the_second_resume_and_each_resume_tells(one_model: bool, tmp_path: Path) -> None:
    make = trainer_of(freeze_the_first_layer, Checkpoint("1 step"))
    trainer = make(tmp_path)
    for steps in (4, 6):
        trainer.max_steps = steps
        trainer.fit(resume="auto")
        trainer = trainer if one_model else make(tmp_path)
    last = trainer_of(Checkpoint("1 step"))(tmp_path)
    run = last.fit(resume="auto")
    assert flags(last.model) == FROZEN
    assert "requires_grad of first.weight is False; requires_grad of first.bias is False; training of norm is False" in run.why(
        "flags restored"
    )


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
