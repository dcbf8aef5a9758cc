"""Freeze: parts of the model stay as they are for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, Freeze, freeze, unfreeze
from cadenza.errors import ScheduleError
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer


class Network(nn.Module):
    """A backbone of two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {f"block{i}": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for i in (1, 2)}
        self.backbone = nn.Sequential()
        self.backbone.add_module("stem", nn.Linear(1, 4))
        for name, block in blocks.items():
            self.backbone.add_module(name, block)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        predictions: Tensor = self.head(self.backbone(inputs) * self.scale)
        return predictions


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, 0.01, weight_decay=0.5)


def changes(run_arguments: dict[str, Any], *callbacks: Callback) -> dict[int, set[str]]:
    """Return the names of the weights and statistics that changed in each epoch."""
    model = Network()
    last = {name: value.clone() for name, value in model.state_dict().items()}
    changed: dict[int, set[str]] = {}

    @on(Callback.on_epoch_end)
    def look(run: Run) -> None:
        now = {name: value.clone() for name, value in model.state_dict().items()}
        changed[run.progress.epoch] = {name for name, value in now.items() if not torch.equal(value, last[name])}
        last.update(now)

    tiny_run(model=model, optimizer=adamw, callbacks=[*callbacks, look], **run_arguments)
    return changed


ALL = set(Network().state_dict())
BACKBONE = {name for name in ALL if name.startswith("backbone.")}
BLOCK2 = {name for name in ALL if name.startswith("backbone.block2.")}
STATISTICS = {name for name in ALL if "running" in name or "tracked" in name}
NORMS = {name for name in ALL if ".1." in name}


# -- what is frozen, and until when -------------------------------------------------------------------


def test_what_is_named_stays_as_it_is_to_the_bit_until_the_point_is_reached() -> None:
    changed = changes({"epochs": 4}, Freeze("backbone", until="2 epochs"))
    assert changed == {1: ALL - BACKBONE, 2: ALL - BACKBONE, 3: ALL, 4: ALL}


def test_without_a_point_it_stays_for_the_whole_run() -> None:
    assert changes({"epochs": 2}, Freeze(["backbone", "scale"])) == dict.fromkeys((1, 2), ALL - BACKBONE - {"scale"})


def test_parts_are_let_go_one_after_the_other_and_what_several_name_belongs_to_the_first() -> None:
    changed = changes({"epochs": 4}, Freeze({"backbone.block2": "1 epoch", "backbone.*": "3 epochs"}))
    late = BACKBONE - BLOCK2
    assert changed == {1: ALL - BACKBONE, 2: ALL - late, 3: ALL - late, 4: ALL}


def test_a_point_may_lie_inside_of_an_epoch() -> None:
    requires: list[bool] = []
    look = on(Callback.on_step_start)(lambda run: requires.append(run.model.get_parameter("weight").requires_grad))
    tiny_run(callbacks=[Freeze("weight", until="3 steps"), look])
    assert requires == [False, False, False, True, True]


def test_a_function_of_the_model_may_choose() -> None:
    def linear_layers(model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, nn.Linear)]

    linear = {name for name in ALL if name.endswith((".0.weight", ".0.bias")) or "stem" in name or "head" in name}
    assert changes({"epochs": 1}, Freeze(linear_layers)) == {1: ALL - linear}
    assert changes({"epochs": 1}, Freeze(lambda model: cast("Network", model).backbone)) == {1: ALL - BACKBONE}


def test_layers_with_statistics_may_go_on_learning() -> None:
    assert changes({"epochs": 1}, Freeze("backbone", batch_norm=False)) == {1: ALL - (BACKBONE - NORMS)}


def test_frozen_statistics_stay_in_evaluation_mode_also_after_an_evaluation_and_dropout_stays_on() -> None:
    modes: list[tuple[bool, bool]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        norm, dropout = (run.model.get_submodule(f"backbone.block1.{index}") for index in (1, 2))
        modes.append((norm.training, dropout.training))

    evaluate = Evaluate(tiny_loader(1), every="1 step")
    tiny_run(model=Network(), callbacks=[Freeze("backbone", until="3 steps"), evaluate, look])
    assert modes == [(False, True)] * 3 + [(True, True)] * 2


def test_a_frozen_parameter_knows_no_decay_and_no_momentum_and_begins_like_a_new_one() -> None:
    def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)

    kept: list[bool] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        kept.append(run.model.get_parameter("bias") in run.optimizers[0].state)

    tiny_run(optimizer=momentum, callbacks=[Freeze("bias", until="3 steps"), look])
    assert kept == [False, False, False, False, True]


# -- before, after, beside ----------------------------------------------------------------------------


def test_what_required_no_gradient_before_is_left_alone_and_the_rest_is_as_before() -> None:
    model = Network()
    model.scale.requires_grad_(False)
    requires = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    tiny_run(model=model, callbacks=[Freeze("*scale", until="1 step"), Freeze("backbone")])
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == requires
    assert all(module.training for module in model.modules())


def test_after_an_error_all_is_as_it_was() -> None:
    model = Network()

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_run(model=model, callbacks=[Freeze("backbone"), fail])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("longer_first", [True, False])
def test_what_two_of_them_hold_learns_when_both_let_it_go(longer_first: bool) -> None:
    long, short = Freeze("backbone", until="2 epochs"), Freeze(["backbone.block2", "scale"], until="1 epoch")
    changed = changes({"epochs": 3}, *((long, short) if longer_first else (short, long)))
    assert changed == {1: ALL - BACKBONE - {"scale"}, 2: ALL - BACKBONE, 3: ALL}


def test_the_trainer_does_not_miss_an_optimizer_for_what_is_frozen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tiny_run(model=Network(), callbacks=[Freeze("backbone", until="1 step")])
    assert not caplog.records


def test_every_change_is_a_decision() -> None:
    run = tiny_run(model=Network(), epochs=2, callbacks=[Freeze({"backbone.stem": "1 epoch", "scale": "7 steps"})])
    assert [str(decision) for decision in run.decisions] == [
        "frozen by Freeze at epoch 0, step 0, batch 0: 'backbone.stem', 8 parameters, at epoch 1",
        "frozen by Freeze at epoch 0, step 0, batch 0: 'scale', 4 parameters, at step 7",
        "unfrozen by Freeze at epoch 1, step 5, batch 5: 'backbone.stem', 8 parameters, at epoch 1",
        "unfrozen by Freeze at epoch 1, step 7, batch 7: 'scale', 4 parameters, at step 7",
    ]


def test_the_plan_shows_the_points_and_one_that_never_comes() -> None:
    plan = str(tiny_trainer(epochs=2, callbacks=[Freeze({"weight": "1 epoch", "bias": "3 epochs"})]).plan())
    assert "Freeze (at epoch 1) > Freeze (at epoch 3)" in plan
    assert "! Freeze (at epoch 3) never fires: the run ends after 2 epochs" in plan


# -- resuming -----------------------------------------------------------------------------------------


def test_it_continues_to_the_same_bits_before_at_and_after_each_point() -> None:
    def make(directory: Path) -> Trainer:
        gradual = Freeze({"backbone.block2": "1 epoch", "backbone.*": "8 steps"})
        callbacks = [gradual, Freeze(["backbone.block2", "scale"], until="7 steps", batch_norm=False)]
        return tiny_trainer(model=Network(), optimizer=adamw, directory=directory, epochs=3, seed=1, callbacks=callbacks)

    prove_resume(make, at=[3, 5, 6, 7, 8, 11], in_process=True)


def test_what_is_frozen_follows_from_the_counters_when_a_run_goes_on(tmp_path: Path) -> None:
    requires: dict[int, bool] = {}

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        requires[run.progress.step] = run.model.get_parameter("weight").requires_grad

    for steps in (2, 4, 6):
        callbacks = [Freeze("weight", until="3 steps"), look, Checkpoint()]
        tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks).fit(resume="auto")
    assert requires == {0: False, 1: False, 2: False, 3: True, 4: True, 5: True}


# -- errors -------------------------------------------------------------------------------------------


def test_a_name_that_fits_nothing_is_an_error() -> None:
    message = r"no module or parameter .* matches 'backbon'\. Did you mean 'backbone'\? It has backbone \(Sequential\)"
    with pytest.raises(ValueError, match=message):
        tiny_run(model=Network(), callbacks=[Freeze("backbon")])


def test_a_model_that_is_frozen_whole_is_an_error_and_is_let_go() -> None:
    trainer = tiny_trainer(callbacks=[Freeze("*")])
    with pytest.raises(ValueError, match=r"nothing is left to learn: '\*' freezes every parameter of the optimizers"):
        trainer.fit()
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("head", "3 epoks"), ScheduleError, "unknown unit 'epoks'"),
        (("head", "10 min"), ScheduleError, "no point of a run that is the same after a resume"),
        (("head", 3), TypeError, 'until must be a point of the run such as "3 epochs".* got 3'),
        (
            ({"head": "1 epoch"}, "3 epochs"),
            TypeError,
            "modules is a mapping, .* Leave out until='3 epochs'",
        ),
        ((nn.Linear(1, 1),), TypeError, "a function of the model such as lambda model: model.backbone; got Linear"),
        (([nn.Linear(1, 1)],), TypeError, "got Linear"),
    ],
)
def test_wrong_arguments_are_errors(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Freeze(*arguments)


def test_a_function_that_chooses_no_modules_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected modules or parameters to freeze; got 'h'"):
        tiny_run(model=Network(), callbacks=[Freeze(cast("Any", lambda model: "head"))])


# -- as plain functions -------------------------------------------------------------------------------


def test_freezing_all_but_the_last_part_by_hand() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert len(freeze(*list(model.children())[:-1], batch_norm=False)) == 2
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["0.weight", "0.bias"]
    assert model[1].training
    assert len(freeze(*list(model.children())[:-1])) == 2  # the layer with statistics as well, this time
    assert not model[1].training
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tiny_run(model=model)
    assert [name for name, one in model.named_parameters() if not torch.equal(one, before[name])] == ["2.weight", "2.bias"]


def test_unfreezing_by_hand_returns_what_an_optimizer_must_be_given() -> None:
    model = Network()
    freeze(model.backbone, model.scale)
    new = unfreeze(model.backbone.get_submodule("block2"), model.head)
    assert [id(one) for one in new] == [id(one) for one in model.backbone.get_submodule("block2").parameters()]
    assert not model.scale.requires_grad
    assert model.backbone.get_submodule("block2.1").training
    assert not model.backbone.get_submodule("block1.1").training
