"""Ema: a running average of the weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.checkpoint.store import Store
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.held_weights import holders_in
from cadenza.status.plain import same
from cadenza.testing import prove_resume, tiny_run, tiny_trainer


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


@pytest.mark.parametrize(("rampup", "tenth"), [(True, 10), (4, 4)])
def test_a_warmup_gives_the_average_a_short_memory_first(rampup: bool | int, tenth: int) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(0.5, rampup=rampup)
    tiny_run(steps=12, callbacks=[look, ema])
    expected = seen[0]
    for updates, weight in enumerate(seen[1:], start=1):
        decay = min(0.5, (1 + updates) / (tenth + updates))
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


def test_a_module_may_replace_a_buffer_by_a_new_tensor() -> None:
    class Counting(nn.Linear):
        seen: torch.Tensor

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1  # a new tensor each time, where BatchNorm changes the one it has
            return super().forward(inputs)

    model, ema = Counting(1, 1), Ema(0.5)
    model.register_buffer("seen", torch.tensor(0))
    run = tiny_run(model=model, steps=3, callbacks=[ema])
    assert averaged(ema)["seen"] == 3
    with ema.in_place(run):
        model(torch.ones(1, 1))
        assert model.seen == 4
    assert model.seen == 3


def test_weights_of_whole_numbers_are_copied() -> None:
    model, ema = nn.Linear(1, 1), Ema(0.5)
    model.register_parameter("codes", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))

    @on(Callback.on_step_start)
    def change(run: Run) -> None:
        model.get_parameter("codes").add_(1)

    tiny_run(model=model, steps=3, callbacks=[change, ema])
    assert averaged(ema)["codes"].tolist() == [3, 3]


def test_half_precision_is_averaged_in_float32_so_that_small_weights_count() -> None:
    def compute_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0].bfloat16()).float().sum() * 0
        return loss

    model, ema = nn.Linear(1, 1, dtype=torch.bfloat16), Ema(0.999)

    @on(Callback.on_step_end)
    def move(run: Run) -> None:
        with torch.no_grad():
            model.weight.fill_(1.0 if run.progress.step == 1 else 2.0)

    run = tiny_run(model=model, compute_loss=compute_loss, steps=4, callbacks=[move, ema])
    assert averaged(ema)["weight"].dtype is torch.float32
    assert averaged(ema)["weight"].item() == pytest.approx(2 - 0.999**3)
    with ema.in_place(run):
        assert model.weight.dtype is torch.bfloat16
    assert model.weight.item() == 2.0


def test_before_the_first_update_the_model_keeps_its_own_weights() -> None:
    ema, inside = Ema(every="4 steps"), []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        own = run.model.get_parameter("weight").item()
        with ema.in_place(run):
            inside.append(run.model.get_parameter("weight").item() == own)

    tiny_run(steps=6, callbacks=[ema, look])
    assert inside == [True, True, True, True, False, False]


def test_in_place_gives_the_model_the_average_and_then_its_own_weights_also_after_an_error() -> None:
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


def test_using_the_average_during_a_run_does_not_change_the_run() -> None:
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


def test_in_place_keeps_the_tensors_and_their_memory() -> None:
    ema = Ema(0.9)
    run = tiny_run(model=network(), steps=5, callbacks=[ema])
    before = [(id(one), one.data_ptr()) for one in run.model.parameters()]
    with ema.in_place(run):
        assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == before
    assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == before


def test_the_run_can_end_with_the_average_and_what_is_saved_last_are_the_weights_of_the_last_step(tmp_path: Path) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(0.5, use_at_end=True)
    run = tiny_run(directory=tmp_path, steps=4, callbacks=[look, ema, Checkpoint()])
    assert same(dict(run.model.state_dict()), averaged(ema))
    assert run.model.get_parameter("weight").item() != seen[-1]
    assert run.why("averaged weights in place").startswith("averaged weights in place by Ema at epoch 0, step 4")
    store = Store(tmp_path / "checkpoints")
    assert store.read(store.saved()[-1]).model["weight"].item() == seen[-1]


def test_an_error_leaves_the_model_its_own_weights() -> None:
    seen: list[float] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        seen.append(run.model.get_parameter("weight").item())
        if run.progress.step == 3:
            raise ZeroDivisionError

    trainer = tiny_trainer(steps=5, callbacks=[Ema(0.5, use_at_end=True), look])
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.model.get_parameter("weight").item() == seen[-1]


def test_a_run_without_an_update_says_so_and_keeps_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = tiny_run(steps=2, callbacks=[Ema(every="3 steps", use_at_end=True)])
    assert "Ema: the run ended before the first average, so the model keeps its own weights" in caplog.text
    assert run.model.get_parameter("weight").item() == tiny_run(steps=2).model.get_parameter("weight").item()


def test_a_run_with_several_averages_continues_to_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        averages = [Ema(0.9, rampup=True, use_at_end=True), Ema(0.5, every="3 steps", name="fast")]
        return tiny_trainer(model=network(), directory=directory, epochs=2, seed=1, callbacks=averages)

    prove_resume(make, at=[1, 3, 5, 7], in_process=True)


def test_two_averages_need_two_names() -> None:
    with pytest.raises(CallbackError, match=r"two callbacks hold weights that are called 'ema'.* such as Ema\(name='slow'\)"):
        tiny_run(callbacks=[Ema(0.9), Ema(0.99)])
    run = tiny_run(callbacks=[Ema(0.9), Ema(0.99, name="slow")])
    assert list(holders_in(hooks_of(run))) == ["ema", "slow"]
    assert list(hooks_of(run).callbacks) == ["Ema", "Ema(slow)"]


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


@pytest.mark.parametrize("rampup", [1, -3, 0, 2.5])
def test_a_rampup_out_of_range_is_an_error(rampup: int) -> None:
    with pytest.raises(ValueError, match="rampup must be True, False or a whole number of at least 2; got"):
        Ema(rampup=rampup)


def test_a_name_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="Ema: name must be a text such as 'ema'; got ''"):
        Ema(name="")


def test_before_a_run_there_is_no_average() -> None:
    run = tiny_run(steps=1)
    with pytest.raises(RuntimeError, match="no average yet: it is made when a run is set up"), Ema().in_place(run):
        pass
