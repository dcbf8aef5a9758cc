"""Ema: a running average of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.store.tree import same
from cadenza.testing import check_callback, tiny_run, tiny_trainer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def averaged(ema: Ema) -> dict[str, torch.Tensor]:
    assert ema.average is not None
    return dict(ema.average.module.state_dict())


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_average_is_that_of_the_formula(decay: float) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(decay)
    tiny_run(steps=6, callbacks=[look, ema])
    expected = seen[0]  # the average begins with the first weights it sees
    for weight in seen[1:]:
        expected = decay * expected + (1 - decay) * weight
    assert averaged(ema)["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_it_is_updated_at_its_cadence() -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end, every=2)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(0.5, every="2 steps")
    tiny_run(steps=5, callbacks=[look, ema])
    assert averaged(ema)["weight"].item() == pytest.approx(0.5 * seen[0] + 0.5 * seen[1], rel=1e-6)


def test_buffers_are_copied_and_not_averaged() -> None:
    model, ema = network(), Ema(0.9)
    tiny_run(model=model, steps=5, callbacks=[ema])
    for name, buffer in model.named_buffers():
        assert torch.equal(averaged(ema)[name], buffer), name
    assert not torch.equal(averaged(ema)["0.weight"], model.state_dict()["0.weight"])


def test_in_place_the_model_has_the_average_and_afterwards_its_own_weights_whatever_happens() -> None:
    ema = Ema(0.9)
    run = tiny_run(model=network(), steps=5, callbacks=[ema])
    own = {name: value.clone() for name, value in run.model.state_dict().items()}
    with ema.in_place(run):
        assert same(dict(run.model.state_dict()), averaged(ema))
    assert same(dict(run.model.state_dict()), own)

    def fail_inside() -> None:
        with ema.in_place(run):
            run.model.get_parameter("0.weight").data.fill_(7)
            raise ZeroDivisionError

    before = {name: value.clone() for name, value in averaged(ema).items()}
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert same(dict(run.model.state_dict()), own)
    assert same(averaged(ema), before)


def test_looking_at_the_average_in_the_middle_of_a_run_does_not_change_the_run() -> None:
    def final(look: bool) -> dict[str, torch.Tensor]:
        ema = Ema(0.9)

        @on(Callback.on_step_end)
        def inside(run: Run) -> None:
            if look:
                with ema.in_place(run):
                    run.model.eval()(torch.ones(2, 1))
                run.model.train()

        return dict(tiny_run(model=network(), steps=5, callbacks=[ema, inside]).model.state_dict())

    assert same(final(True), final(False))


def test_the_average_survives_a_resume(tmp_path: Path) -> None:
    def trainer(directory: Path, steps: int) -> tuple[Trainer, Ema]:
        ema = Ema(0.9)
        return tiny_trainer(model=network(), directory=directory, steps=steps, seed=1, callbacks=[ema, Checkpoint()]), ema

    whole, expected = trainer(tmp_path / "whole", 8)
    whole.fit()
    trainer(tmp_path / "cut", 3)[0].fit()
    continued, ema = trainer(tmp_path / "cut", 8)
    continued.fit(resume="auto")
    assert same(ema.state_dict(), expected.state_dict())


def test_the_same_callback_begins_anew_with_another_run() -> None:
    ema, other = Ema(0.9), Ema(0.9)
    tiny_run(steps=7, callbacks=[ema])
    tiny_run(steps=3, callbacks=[ema])
    tiny_run(steps=3, callbacks=[other])
    assert same(averaged(ema), averaged(other))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_a_decay_out_of_range_is_an_error(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be at least 0 and less than 1; got"):
        Ema(decay)


def test_before_a_run_there_is_no_average() -> None:
    run = tiny_run(steps=1)
    with pytest.raises(RuntimeError, match="no average yet: it is made when a run is set up"), Ema().in_place(run):
        pass


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(lambda: Ema(0.5))
