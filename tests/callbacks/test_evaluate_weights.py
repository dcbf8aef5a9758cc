"""Evaluate(weights=...): the model is judged with averaged weights, and trained with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import BestWeights, Checkpoint, Ema, Evaluate, Swa
from cadenza.errors import DataError
from cadenza.hooks import HeldWeights
from cadenza.status.plain import same
from cadenza.testing import Recorder, prove_resume, tiny_loader, tiny_run, tiny_trainer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def judged(**options: Any) -> Evaluate:
    return Evaluate(tiny_loader(2), **options)


def test_the_result_is_that_of_the_model_with_the_averaged_weights() -> None:
    ema = Ema(0.9)
    trainer = tiny_trainer(model=network(), epochs=2, callbacks=[ema, judged(), judged(weights="ema", name="averaged")])
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


def test_evaluating_with_the_average_does_not_change_the_run() -> None:
    def final(*evaluations: Evaluate) -> dict[str, Tensor]:
        run = tiny_run(model=network(), epochs=2, callbacks=[Ema(0.9), *evaluations], accumulate=2)
        return {**run.model.state_dict(), "rate": torch.tensor(run.optimizers[0].param_groups[0]["lr"])}

    assert same(final(judged(every="1 step", weights="ema", sanity_batches=1)), final())


def test_after_an_error_in_the_evaluation_the_model_has_its_own_weights_in_on_exception() -> None:
    own: list[dict[str, Tensor]] = []
    seen: list[dict[str, Tensor]] = []

    def state(run: Run) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in run.model.state_dict().items()}

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not same(dict(model.state_dict()), own[-1])
        raise ZeroDivisionError

    keep = on(Callback.on_step_end)(lambda run: own.append(state(run)))
    watch = on(Callback.on_exception)(lambda run, error: seen.append(state(run)))
    with pytest.raises(ZeroDivisionError):
        tiny_run(model=network(), callbacks=[Ema(0.9), keep, watch, judged(compute=compute, weights="ema")])
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

    model = network()
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
        return tiny_trainer(model=network(), directory=directory, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[2, 3, 5, 6], in_process=True)


def test_before_swa_begins_the_model_itself_is_judged() -> None:
    callbacks = [Swa("2 epochs"), judged(), judged(weights="swa", name="swa")]
    run = tiny_run(epochs=4, callbacks=callbacks)
    alike = [one == other for one, other in zip(run.history["eval/loss"], run.history["swa/loss"], strict=True)]
    assert alike == [True, True, False, False]  # after 2 epochs the average is that of one set of weights


def test_weights_that_no_callback_provides_are_an_error_at_the_start() -> None:
    recorder = Recorder(Callback.on_epoch_start)
    message = r"Evaluate\(weights='emma'\) needs averaged weights, but no callback provides 'emma'; available: 'ema', 'fast'\."
    with pytest.raises(ValueError, match=message) as e:
        tiny_run(callbacks=[Ema(), Ema(name="fast"), judged(weights="emma"), recorder])
    assert str(e.value).endswith("Did you mean 'ema'?")
    assert not recorder.names
    with pytest.raises(ValueError, match=r"no callback provides 'ema'\. Add Ema\(\.\.\.\) to callbacks\."):
        tiny_run(callbacks=[judged(weights="ema")])


def test_two_evaluations_need_two_names_here_as_well() -> None:
    with pytest.raises(ValueError, match="two evaluations have the name 'eval'"):
        tiny_run(callbacks=[Ema(), judged(), judged(weights="ema")])


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
