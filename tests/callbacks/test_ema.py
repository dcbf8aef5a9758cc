"""Ema: a running average of the weights. Evaluate(weights=...): the model is judged with it, and trained with its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import BestWeights, Checkpoint, Ema, Evaluate, Swa
from cadenza.errors import DataError
from cadenza.hooks import HeldWeights
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.held_weights import holders_in
from cadenza.status.plain import same
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import normed, state_of


def averaged(ema: Ema) -> dict[str, Tensor]:
    assert ema.average is not None
    return dict(ema.average.module.state_dict())


def judged(**options: Any) -> Evaluate:
    return Evaluate(tiny_loader(2), **options)


@pytest.mark.parametrize(
    ("decay", "rampup", "tenth", "every"),
    [(0.0, False, 0, 1), (0.5, False, 0, 1), (0.9, False, 0, 1), (0.5, True, 10, 1), (0.5, 4, 4, 1), (0.5, False, 0, 2)],
)
def test_the_average_is_that_of_the_formula(decay: float, rampup: bool | int, tenth: int, every: int) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end, every=every)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(decay, rampup=rampup, every=f"{every} steps")
    tiny_run(steps=11, callbacks=[look, ema])
    expected = seen[0]  # the average begins with the first weights it sees
    for updates, weight in enumerate(seen[1:], start=1):
        now = min(decay, (1 + updates) / (tenth + updates)) if rampup else decay  # a ramp-up gives it a short memory first
        expected = now * expected + (1 - now) * weight
    assert averaged(ema)["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_buffers_are_copied_and_not_averaged() -> None:
    model, ema = normed(), Ema(0.9)
    tiny_run(model=model, steps=5, callbacks=[ema])
    for name, buffer in model.named_buffers():
        assert torch.equal(averaged(ema)[name], buffer), name
    assert not torch.equal(averaged(ema)["0.weight"], model.state_dict()["0.weight"])


def test_a_module_may_replace_a_buffer_by_a_new_tensor() -> None:
    class Counting(nn.Linear):
        seen: Tensor

        def forward(self, inputs: Tensor) -> Tensor:
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
    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = model(batch[0].bfloat16()).float().sum() * 0
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


def test_in_place_gives_the_same_tensors_the_average_and_then_their_own_weights_also_after_an_error() -> None:
    ema = Ema(0.9)
    run = tiny_run(model=normed(), steps=5, callbacks=[ema])
    own, average = state_of(run), {name: value.clone() for name, value in averaged(ema).items()}
    tensors = [(id(one), one.data_ptr()) for one in run.model.parameters()]
    with ema.in_place(run):
        assert same(dict(run.model.state_dict()), average)
        assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == tensors
    assert same(dict(run.model.state_dict()), own)
    assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == tensors

    def fail_inside() -> None:
        with ema.in_place(run):
            run.model.get_parameter("0.weight").data.fill_(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert same(dict(run.model.state_dict()), own)
    assert same(averaged(ema), average)


def test_using_the_average_during_a_run_does_not_change_the_run() -> None:
    ema = Ema(0.9)

    def final(*more: Callback) -> dict[str, Tensor]:
        run = tiny_run(model=normed(), epochs=2, callbacks=[ema, *more], accumulate=2)
        return {**run.model.state_dict(), "rate": torch.tensor(run.optimizers[0].param_groups[0]["lr"])}

    @on(Callback.on_step_end)
    def inside(run: Run) -> None:
        with ema.in_place(run):
            run.model.eval()(torch.ones(2, 1))
        run.model.train()

    alone = final()
    assert same(final(inside), alone)
    assert same(final(judged(every="1 step", weights="ema", sanity_batches=1)), alone)


def test_the_run_can_end_with_the_average() -> None:
    ema = Ema(0.5, use_at_end=True)
    run = tiny_run(steps=4, callbacks=[ema])
    assert same(dict(run.model.state_dict()), averaged(ema))
    assert run.why("averaged weights in place").startswith("averaged weights in place by Ema at epoch 0, step 4")


def test_a_run_without_an_update_says_so_and_keeps_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = tiny_run(steps=2, callbacks=[Ema(every="3 steps", use_at_end=True)])
    assert "Ema: the run ended before the first average, so the model keeps its own weights" in caplog.text
    assert run.model.get_parameter("weight").item() == tiny_run(steps=2).model.get_parameter("weight").item()


def test_a_run_with_several_averages_continues_to_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        averages = [Ema(0.9, rampup=True, use_at_end=True), Ema(0.5, every="3 steps", name="fast")]
        return tiny_trainer(model=normed(), directory=directory, epochs=2, seed=1, callbacks=averages)

    prove_resume(make, at=[1, 5], in_process=True)


def test_two_averages_have_two_names() -> None:
    run = tiny_run(callbacks=[Ema(0.9), Ema(0.99, name="slow")])
    assert list(holders_in(hooks_of(run))) == ["ema", "slow"]
    assert list(hooks_of(run).callbacks) == ["Ema", "Ema(slow)"]


def test_before_a_run_there_is_no_average() -> None:
    run = tiny_run(steps=1)
    with pytest.raises(RuntimeError, match="no average yet: it is made when a run is set up"), Ema().in_place(run):
        pass


# -- evaluated ----------------------------------------------------------------------------------------


def test_the_result_is_that_of_the_model_with_the_averaged_weights() -> None:
    ema = Ema(0.9)
    trainer = tiny_trainer(model=normed(), epochs=2, callbacks=[ema, judged(), judged(weights="ema", name="averaged")])
    run = trainer.fit()
    with ema.in_place(run):
        expected = trainer.evaluate(tiny_loader(2))["eval/loss"]
    assert run.history["averaged/loss"][-1][1] == expected
    assert run.history["eval/loss"][-1][1] != expected
    assert run.history["eval/loss"][-1][1] == trainer.evaluate(tiny_loader(2))["eval/loss"]


@pytest.mark.parametrize("first", [True, False])
def test_the_average_has_the_weights_of_this_step_wherever_it_stands_in_the_list(first: bool) -> None:
    ema, evaluate = Ema(0.5), judged(every="1 step", weights="ema")
    updates: list[int] = []

    @on(Callback.on_eval_end)
    def look(run: Run, evaluation: Any) -> None:
        assert ema.average is not None
        updates.append(ema.average.updates)

    tiny_run(steps=3, callbacks=[look, ema, evaluate] if first else [look, evaluate, ema])
    assert updates == [1, 2, 3]


def test_after_an_error_in_the_evaluation_the_model_has_its_own_weights_in_on_exception() -> None:
    own: list[dict[str, Tensor]] = []
    seen: list[dict[str, Tensor]] = []

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not same(dict(model.state_dict()), own[-1])
        raise ZeroDivisionError

    keep = on(Callback.on_step_end)(lambda run: own.append(state_of(run)))
    watch = on(Callback.on_exception)(lambda run, error: seen.append(state_of(run)))
    with pytest.raises(ZeroDivisionError):
        tiny_run(model=normed(), callbacks=[Ema(0.9), keep, watch, judged(compute=compute, weights="ema")])
    assert same(seen[0], own[-1])


def test_the_trial_before_the_first_epoch_takes_the_same_way() -> None:
    seen: list[float] = []

    class Doubled(Callback):
        def on_setup(self, run: Run) -> None:
            weights = {name: one * 2 if name == "0.weight" else one for name, one in run.model.state_dict().items()}
            self.weights = {name: one.clone() for name, one in weights.items()}

        def state_dict(self) -> dict[str, Any]:
            return {"doubled": self.weights}

        def held_weights(self) -> dict[str, HeldWeights]:
            return {"doubled": HeldWeights("doubled")}

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        seen.append(model.get_parameter("0.weight").sum().item())
        return {"loss": torch.tensor(0.0)}

    model = normed()
    first = model.get_parameter("0.weight").sum().item()
    tiny_run(model=model, callbacks=[Doubled(), judged(compute=compute, sanity_batches=1, weights="doubled")])
    assert seen[0] == 2 * first


def test_listeners_of_the_evaluation_see_the_evaluated_weights() -> None:
    ema, best = Ema(0.5), BestWeights("eval/loss", "min")
    run = tiny_run(steps=5, callbacks=[ema, judged(every="1 step", weights="ema"), best])
    assert best.step == 5
    assert ema.average is not None
    assert same(dict(run.model.state_dict()), dict(ema.average.module.state_dict()))


def test_what_is_saved_for_the_best_result_are_the_weights_with_which_the_run_goes_on(tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        saving = Checkpoint("2 steps", keep_best=("eval/loss", "min"))
        callbacks = [saving, judged(every="3 steps", weights="ema", sanity_batches=1), Ema(0.9, rampup=True)]
        return tiny_trainer(model=normed(), directory=directory, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[3, 5], in_process=True)


def test_before_swa_begins_the_model_itself_is_judged() -> None:
    callbacks = [Swa("2 epochs"), judged(), judged(weights="swa", name="swa")]
    run = tiny_run(epochs=4, callbacks=callbacks)
    alike = [one == other for one, other in zip(run.history["eval/loss"], run.history["swa/loss"], strict=True)]
    assert alike == [True, True, False, False]  # after 2 epochs the average is that of one set of weights


def test_the_plan_names_the_evaluated_weights() -> None:
    plan = str(tiny_trainer(callbacks=[judged(weights="ema", limit=2), Ema()]).plan())
    assert "Evaluate (every epoch, 2 batches, weights 'ema')" in plan
    assert "order: Evaluate comes after Ema" in plan


def test_a_loader_without_batches_is_named_and_the_weights_are_put_back() -> None:
    ema = Ema(0.9)
    trainer = tiny_trainer(callbacks=[ema, Evaluate([], weights="ema")])
    with pytest.raises(DataError, match="the loader of 'eval' gave no batch"):
        trainer.fit()
    assert ema.average is not None
    assert not same(dict(trainer.model.state_dict()), dict(ema.average.module.state_dict()))
