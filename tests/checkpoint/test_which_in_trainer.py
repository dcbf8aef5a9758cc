"""Trainer.evaluate(which=..., weights=...) and predict: the chosen weights are evaluated, and the model is as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, export_weights, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Ema, OmitFrozen
from cadenza.errors import CheckpointError, CheckpointMismatchError
from cadenza.loading.evaluation import Evaluation
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_trainer
from tests.checkpoint.chosen import WORST_FIRST, evaluated, history_of, network, state_of, trained


@pytest.mark.parametrize("compiled", [False, "eager"])
def test_the_best_is_evaluated_after_a_fit_and_the_model_is_as_before(tmp_path: Path, compiled: Any) -> None:
    options: dict[str, Any] = {"compile": {"backend": "eager"}} if compiled else {}
    trainer = trained(tmp_path, **options)
    before, live = state_of(trainer), trainer.evaluate(tiny_loader(3))
    tensors = [id(one) for one in trainer.model.parameters()]
    best = trainer.evaluate(tiny_loader(3), which="best")
    assert best["eval/loss"] == max(history_of(tmp_path, "eval/loss"))
    averaged = trainer.evaluate(tiny_loader(3), which="best", weights="ema")
    assert len({one["eval/loss"] for one in (live, best, averaged)}) == 3
    assert same(state_of(trainer), before)
    assert [id(one) for one in trainer.model.parameters()] == tensors
    assert trainer.evaluate(tiny_loader(3)) == live


def test_predictions_are_those_of_the_chosen_weights(tmp_path: Path) -> None:
    trainer = trained(tmp_path, compute_loss=supervised(nn.MSELoss()))
    before = state_of(trainer)
    model = network()
    load_weights(tmp_path, model, which="best", weights="ema")
    expected = torch.cat([model.eval()(inputs) for inputs, _ in tiny_loader()])
    assert torch.equal(trainer.predict(tiny_loader(), which="best", weights="ema"), expected)
    assert same(state_of(trainer), before)


def test_after_an_error_the_model_has_its_weights_again(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    before = state_of(trainer)

    def failing(model: nn.Module, batch: Any) -> Any:
        assert not same(dict(model.state_dict()), before)
        raise RuntimeError("in the evaluation")

    with pytest.raises(RuntimeError, match="in the evaluation"):
        trainer.evaluate(tiny_loader(), compute=failing, which="best")
    assert same(state_of(trainer), before)


def test_the_averaged_weights_in_memory_need_no_checkpoint() -> None:
    ema = Ema(0.5)
    trainer = tiny_trainer(model=network(), steps=4, callbacks=[ema])
    with pytest.raises(ValueError, match=r"evaluate\(weights='ema'\) needs averaged weights, and Ema has none yet"):
        trainer.evaluate(tiny_loader(), weights="ema")
    run = trainer.fit()
    with ema.in_place(run):
        expected = trainer.evaluate(tiny_loader())
    assert trainer.evaluate(tiny_loader(), weights="ema") == expected != trainer.evaluate(tiny_loader(), weights="model")
    with pytest.raises(
        ValueError, match=r"predict\(weights='eva'\).*no callback provides 'eva'; available: 'ema'.*Did you mean"
    ):
        trainer.predict(tiny_loader(), compute=lambda model, batch: model(batch[0]), weights="eva")


def test_hooks_learn_which_weights_are_evaluated(tmp_path: Path) -> None:
    seen = []

    @on(Callback.on_eval_start)
    def look(run: Run, evaluation: Evaluation) -> None:
        seen.append((evaluation.weights, run.why("weights in place"), [one.data for one in run.decisions]))

    trainer = trained(tmp_path, callbacks=[look])
    seen.clear()
    trainer.evaluate(tiny_loader(), which="best", weights="ema")
    [(weights, why, [data])] = seen
    assert weights == "ema"
    assert why.endswith(f"'ema' of {tmp_path}/checkpoints/step-00000002")
    assert (data["checkpoint"], data["step"], data["best"][0]["monitor"]) == ("step-00000002", 2, "eval/loss")


def test_inside_of_a_fit_the_training_does_not_notice(tmp_path: Path) -> None:
    def trainer(directory: Path, *callbacks: Any) -> Trainer:
        saves = Checkpoint("2 steps", keep_best=WORST_FIRST, background=False)
        arguments: dict[str, Any] = {
            "model": network(),
            "callbacks": [evaluated(), saves, *callbacks],
            "seed": 1,
            "precision": "bf16",
        }
        return tiny_trainer(steps=8, accumulate=2, directory=directory, **arguments)

    @on(Callback.on_step_end, at=6)
    def compare(run: Run) -> None:
        results.append(watched.evaluate(tiny_loader(3), which="best"))

    results: list[dict[str, float]] = []
    plain, watched = trainer(tmp_path / "plain"), trainer(tmp_path / "watched", compare)
    plain.fit()
    watched.fit()
    assert results == [{"eval/loss": max(history_of(tmp_path / "watched", "eval/loss"))}]
    assert same(state_of(plain), state_of(watched))


def test_without_a_directory_or_a_checkpoint_the_error_comes_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"evaluate\(which='best'\) looks for checkpoints in the directory.*the trainer has none"
    ):
        tiny_trainer().evaluate(tiny_loader(), which="best")
    with pytest.raises(ValueError, match="Did you mean 'best'"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), which="bets")
    with pytest.raises(CheckpointError, match="there are no weights at"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), which="best")
    with pytest.raises(TypeError, match="weights must be 'model' or the name"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), weights=True)  # type: ignore[arg-type]


def test_a_path_is_taken_without_a_directory_and_another_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000002"
    trainer = tiny_trainer(model=network())
    assert trainer.evaluate(tiny_loader(3), which=path) == {"eval/loss": max(history_of(tmp_path, "eval/loss"))}
    assert trainer.evaluate(tiny_loader(3), which=str(tmp_path)) == trainer.evaluate(
        tiny_loader(3), which=path.with_name("step-00000008")
    )
    export_weights(tmp_path, tmp_path / "w.safetensors", which="best")
    assert trainer.evaluate(tiny_loader(3), which=tmp_path / "w.safetensors") == trainer.evaluate(tiny_loader(3), which=path)
    with pytest.raises(CheckpointMismatchError, match="does not fit the model, which is as it was"):
        tiny_trainer().evaluate(tiny_loader(), which=path)


def test_checkpoints_in_another_folder_are_found_without_a_directory(tmp_path: Path) -> None:
    saves = Checkpoint("2 steps", keep_best=WORST_FIRST, directory=tmp_path)
    trainer = tiny_trainer(model=network(), steps=6, callbacks=[evaluated(), saves])
    run = trainer.fit()
    best = max(run.history["eval/loss"], key=lambda point: point[1])[1]
    assert trainer.evaluate(tiny_loader(3), which="best") == {"eval/loss": best}


class Scaled(nn.Module):
    """A loss with a weight of its own and a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return nn.functional.mse_loss(predictions * self.scale, targets) + 0.01 * self.calls


@pytest.mark.parametrize("as_function", [True, False])
def test_the_weights_of_the_loss_are_those_of_the_checkpoint(tmp_path: Path, as_function: bool) -> None:
    loss, model = Scaled(), network()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, loss.scale], lr=0.1)

    optimizer = make if as_function else make(model.parameters())
    trainer = trained(tmp_path, model=model, optimizer=optimizer, compute_loss=supervised(loss), keep_best=("eval/loss", "min"))
    before = (loss.scale.clone(), loss.calls.clone(), state_of(trainer))
    best = trainer.evaluate(tiny_loader(3), which="best")["eval/loss"]
    assert best == min(history_of(tmp_path, "eval/loss"))
    assert same((loss.scale.detach().clone(), loss.calls.clone(), state_of(trainer)), (before[0].detach(), *before[1:]))


def test_frozen_weights_that_a_checkpoint_leaves_out_stay(tmp_path: Path) -> None:
    model = network()
    model[0].requires_grad_(False)
    trainer = trained(tmp_path, model=model, callbacks=[OmitFrozen()], optimizer=torch.optim.SGD(model[1:].parameters(), 0.1))
    before = state_of(trainer)
    assert trainer.evaluate(tiny_loader(3), which="best", weights="ema") != trainer.evaluate(tiny_loader(3))
    assert trainer.evaluate(tiny_loader(3), which="best")["eval/loss"] == max(history_of(tmp_path, "eval/loss"))
    assert same(state_of(trainer), before)
