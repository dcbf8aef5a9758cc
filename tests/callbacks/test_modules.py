"""MoveModules and ConvertSyncBatchNorm: modules are where, and what, they must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import SingleDriver, Trainer
from cadenza.callbacks import ConvertSyncBatchNorm, Ema, MoveModules
from cadenza.loading.shards import Shard
from cadenza.testing import prove_resume, tiny_run, tiny_trainer

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


def test_an_optimizer_that_holds_their_parameters_still_does() -> None:
    loss = Centred()
    optimizer = lambda parameters: torch.optim.SGD([*parameters, loss.centre], 0.1)  # noqa: E731  # shorter to read
    tiny_run(optimizer=optimizer, compute_loss=loss, callbacks=[MoveModules(loss)])
    assert loss.centre.item() != 0


def test_what_they_hold_continues_to_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        loss = Centred()
        optimizer = lambda parameters: torch.optim.SGD([*parameters, loss.centre], 0.1)  # noqa: E731  # shorter to read
        callbacks = [MoveModules(nn.Identity(), loss)]
        return tiny_trainer(directory=directory, optimizer=optimizer, compute_loss=loss, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[1, 5, 7], in_process=True)


def test_modules_that_hold_nothing_have_no_state() -> None:
    assert MoveModules(nn.MSELoss(), nn.Identity()).state_dict() == {}


def test_only_modules_can_be_moved_in_place() -> None:
    with pytest.raises(TypeError, match="MoveModules takes modules, which can be moved in place; got Tensor"):
        MoveModules(nn.MSELoss(), cast("Any", torch.ones(1)))
    with pytest.raises(TypeError, match=r"such as MoveModules\(loss\); got none"):
        MoveModules()


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


def test_on_many_ranks_batch_norm_is_converted_and_what_it_held_stays() -> None:
    model = network()
    held = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    run = tiny_run(model=model, driver=OneOfTwo("cpu"), callbacks=[ConvertSyncBatchNorm()])
    assert kinds(model) == ["SyncBatchNorm", "SyncBatchNorm"]
    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == held
    assert run.why("converted").endswith("2 BatchNorm layers, to SyncBatchNorm over 2 ranks")


def test_the_converted_layers_are_trained_and_compute_the_same_where_there_is_no_other_rank() -> None:
    converted = tiny_run(model=network(), driver=OneOfTwo("cpu"), epochs=2, callbacks=[ConvertSyncBatchNorm(), Ema(0.9)])
    plain = tiny_run(model=network(), epochs=2)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(converted.model.state_dict()[name], value), name


def test_a_second_run_finds_nothing_left_to_convert() -> None:
    trainer = tiny_trainer(model=network(), driver=OneOfTwo("cpu"), callbacks=[ConvertSyncBatchNorm()])
    trainer.fit()
    layers = [id(module) for module in trainer.model.modules()]
    assert trainer.fit().why("converted").endswith("0 BatchNorm layers, to SyncBatchNorm over 2 ranks")
    assert [id(module) for module in trainer.model.modules()] == layers


def test_on_one_rank_the_model_is_left_alone() -> None:
    run = tiny_run(model=network(), callbacks=[ConvertSyncBatchNorm()])
    assert kinds(run.model) == ["BatchNorm1d", "BatchNorm1d"]
    assert run.why("left alone").endswith("BatchNorm, as there is one rank")


def test_a_model_that_is_nothing_but_batch_norm_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"replaces layers inside a model; got a model that is one\. Wrap it"):
        tiny_run(model=nn.BatchNorm1d(1), driver=OneOfTwo("cpu"), callbacks=[ConvertSyncBatchNorm()])
