"""Freeze, MoveModules and ConvertSyncBatchNorm: modules learn when, and are where and what, they must be."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cadenza import Callback, Run, SingleDriver, Trainer, on
from cadenza.callbacks import Checkpoint, ConvertSyncBatchNorm, Ema, Evaluate, Freeze, MoveModules, freeze, unfreeze
from cadenza.loading.shards import Shard
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing


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


def linear_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


LINEAR = {name for name in ALL if name.endswith((".0.weight", ".0.bias")) or "stem" in name or "head" in name}
LATE = BACKBONE - BLOCK2
TWO = {1: ALL - BACKBONE - {"scale"}, 2: ALL - BACKBONE, 3: ALL}
LONG, SHORT = Freeze("backbone", until="2 epochs"), Freeze(["backbone.block2", "scale"], until="1 epoch")


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([Freeze("backbone", until="2 epochs")], {1: ALL - BACKBONE, 2: ALL - BACKBONE, 3: ALL, 4: ALL}),
        ([Freeze(["backbone", "scale"])], dict.fromkeys((1, 2), ALL - BACKBONE - {"scale"})),
        # Parts are let go one after the other, and what several name belongs to the first.
        ([Freeze({"backbone.block2": "1 epoch", "backbone.*": "3 epochs"})],
         {1: ALL - BACKBONE, 2: ALL - LATE, 3: ALL - LATE, 4: ALL}),
        ([Freeze(linear_layers)], {1: ALL - LINEAR}),
        ([Freeze(lambda model: cast("Network", model).backbone)], {1: ALL - BACKBONE}),
        ([Freeze("backbone", batch_norm=False)], {1: ALL - (BACKBONE - NORMS)}),
        # What two of them hold learns when both let it go.
        ([LONG, SHORT], TWO),
        ([SHORT, LONG], TWO),
    ],
    ids=["name", "whole run", "one by one", "function", "module", "without statistics", "longer first", "shorter first"],
)  # fmt: skip
def test_what_is_frozen_stays_as_it_is_to_the_bit_until_its_point_is_reached(
    callbacks: list[Callback], expected: dict[int, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert changes({"epochs": len(expected)}, *callbacks) == expected
    assert not caplog.records  # the trainer does not miss an optimizer for what is frozen


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

    kept: list[tuple[bool, bool]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        bias = run.model.get_parameter("bias")
        kept.append((bias.requires_grad, bias in run.optimizers[0].state))

    tiny_run(optimizer=momentum, callbacks=[Freeze("bias", until="3 steps"), look])
    assert kept == [(False, False)] * 3 + [(True, False), (True, True)]


@pytest.mark.parametrize("fails", [False, True])
def test_when_a_run_is_over_or_fails_all_is_as_it_was(fails: bool) -> None:
    model = Network()
    model.scale.requires_grad_(False)
    requires = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        tiny_run(
            model=model,
            callbacks=[
                Freeze("*scale", until="1 step"),
                Freeze("backbone"),
                failing(Callback.on_step_end, at=2 if fails else 99),
            ],
        )
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == requires
    assert all(module.training for module in model.modules())


def test_every_change_is_a_decision_and_the_plan_shows_the_points_and_one_that_never_comes() -> None:
    run = tiny_run(model=Network(), epochs=2, callbacks=[Freeze({"backbone.stem": "1 epoch", "scale": "7 steps"})])
    assert [str(decision) for decision in run.decisions] == [
        "frozen by Freeze at epoch 0, step 0, batch 0: 'backbone.stem', 8 parameters, at epoch 1",
        "frozen by Freeze at epoch 0, step 0, batch 0: 'scale', 4 parameters, at step 7",
        "unfrozen by Freeze at epoch 1, step 5, batch 5: 'backbone.stem', 8 parameters, at epoch 1",
        "unfrozen by Freeze at epoch 1, step 7, batch 7: 'scale', 4 parameters, at step 7",
    ]
    plan = str(tiny_trainer(epochs=2, callbacks=[Freeze({"weight": "1 epoch", "bias": "3 epochs"})]).plan())
    assert "Freeze (at epoch 1) > Freeze (at epoch 3)" in plan
    assert "! Freeze (at epoch 3) never fires: the run ends after 2 epochs" in plan


def test_it_continues_to_the_same_bits_before_at_and_after_each_point() -> None:
    def make(directory: Path) -> Trainer:
        gradual = Freeze({"backbone.block2": "1 epoch", "backbone.*": "8 steps"})
        callbacks = [gradual, Freeze(["backbone.block2", "scale"], until="7 steps", batch_norm=False)]
        return tiny_trainer(model=Network(), optimizer=adamw, directory=directory, epochs=3, seed=1, callbacks=callbacks)

    prove_resume(make, at=[5, 7], in_process=True)


def test_what_is_frozen_follows_from_the_counters_when_a_run_goes_on(tmp_path: Path) -> None:
    requires: list[bool] = []
    look = on(Callback.on_step_start)(lambda run: requires.append(run.model.get_parameter("weight").requires_grad))
    for steps in (2, 4, 6):
        callbacks = [Freeze("weight", until="3 steps"), look, Checkpoint()]
        tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks).fit(resume="auto")
    assert requires == [False, False, False, True, True, True]


def test_a_name_that_fits_nothing_is_an_error_and_a_model_that_cannot_learn_is_let_go() -> None:
    message = r"no module or parameter .* matches 'backbon'\. Did you mean 'backbone'\? It has backbone \(Sequential\)"
    with pytest.raises(ValueError, match=message):
        tiny_run(model=Network(), callbacks=[Freeze("backbon")])
    trainer = tiny_trainer(callbacks=[Freeze("*")])
    with pytest.raises(ValueError, match="nothing is left to learn"):
        trainer.fit()
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


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


# -- MoveModules --------------------------------------------------------------------------------------


class Centred(nn.Module):
    """A loss that learns a centre, and counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.count += 1
        loss: Tensor = (model(batch[0]) - batch[1] - self.centre).square().mean() * (1 + 1 / self.count)
        return loss


def test_modules_beside_the_model_are_moved_to_its_device() -> None:
    loss = Centred()
    run = tiny_run(device="meta", compute_loss=loss, callbacks=[MoveModules(loss)])  # a device without numbers
    assert run.device.type == "meta"
    assert (loss.centre.device.type, loss.count.device.type) == ("meta", "meta")
    assert MoveModules(nn.MSELoss(), nn.Identity()).state_dict() == {}


def test_what_they_hold_is_trained_by_the_optimizer_that_has_it_and_continues_to_the_same_bits() -> None:
    made: list[Centred] = []

    def make(directory: Path) -> Trainer:
        made.append(loss := Centred())
        optimizer = lambda parameters: torch.optim.SGD([*parameters, loss.centre], 0.1)  # noqa: E731  # shorter to read
        callbacks = [MoveModules(nn.Identity(), loss)]
        return tiny_trainer(directory=directory, optimizer=optimizer, compute_loss=loss, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[1, 5], in_process=True)
    assert made[0].centre.item() != 0


# -- ConvertSyncBatchNorm -----------------------------------------------------------------------------


class OneOfTwo(SingleDriver):
    """A driver that reports two ranks. There is no process group, so that layers compute on this rank alone."""

    world_size = 2

    def data_shard(self) -> Shard:
        return replace(super().data_shard(), share_data=False)  # it reads all the data


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__]


def test_on_many_ranks_batch_norm_is_converted_once_and_what_it_held_stays() -> None:
    model = network()
    held = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    trainer = tiny_trainer(model=model, driver=OneOfTwo("cpu"), callbacks=[ConvertSyncBatchNorm()])
    assert trainer.fit().why("converted").endswith("2 BatchNorm layers, to SyncBatchNorm over 2 ranks")
    assert kinds(model) == ["SyncBatchNorm", "SyncBatchNorm"]
    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == held
    layers = [id(module) for module in model.modules()]
    assert trainer.fit().why("converted").endswith("0 BatchNorm layers, to SyncBatchNorm over 2 ranks")
    assert [id(module) for module in model.modules()] == layers


def test_converted_layers_compute_the_same_where_there_is_no_other_rank_and_on_one_rank_the_model_is_left_alone() -> None:
    converted = tiny_run(model=network(), driver=OneOfTwo("cpu"), epochs=2, callbacks=[ConvertSyncBatchNorm(), Ema(0.9)])
    plain = tiny_run(model=network(), epochs=2, callbacks=[ConvertSyncBatchNorm()])
    assert kinds(plain.model) == ["BatchNorm1d", "BatchNorm1d"]
    assert plain.why("left alone").endswith("BatchNorm, as there is one rank")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(converted.model.state_dict()[name], value), name
