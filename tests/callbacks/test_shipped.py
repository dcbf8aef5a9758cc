"""The callbacks that come along, one after the other; `Evaluate` has a file of its own."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from cadenza import Callback, Run, on
from cadenza.callbacks import (
    ClipGradients,
    EarlyStopping,
    Evaluate,
    LearningRate,
    Limit,
    LogTraining,
    StopOnNonFinite,
    TimeLimit,
)
from cadenza.errors import CadenceError, MonitorError, NonFiniteError
from cadenza.testing import Recorder, simulate, tiny_loader, tiny_model, tiny_run, tiny_trainer

# -- EarlyStopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "values", "patience", "min_delta", "epoch"),
    [
        ("min", [3.0, 2.0, 2.1, 2.2, 1.0], 2, 0.0, 4),
        ("min", [3.0, 2.0, 2.1, 1.0, 1.5, 0.5], 2, 0.0, 6),  # a gain in between starts the count anew
        ("max", [0.1, 0.2, 0.2, 0.3], 1, 0.0, 3),
        ("max", [0.1, 0.15, 0.3], 1, 0.1, 2),
        ("min", [math.nan, math.nan, 1.0], 2, 0.0, 2),
    ],
)
def test_early_stopping_stops_after_so_many_evaluations_without_gain(
    mode: Any, values: list[float], patience: int, min_delta: float, epoch: int
) -> None:
    stopping = EarlyStopping("eval/x", mode=mode, patience=patience, min_delta=min_delta)
    assert simulate([stopping], metrics={"eval/x": values}).progress.epoch == epoch


def test_early_stopping_says_why() -> None:
    run = simulate([EarlyStopping("eval/x", mode="min", name="mine")], metrics={"eval/x": [2.0, 3.0]})
    assert run.why("stopped") == "stopped by mine at epoch 2, step 4, batch 4: 'eval/x' did not get better than 2 in evaluation"


def test_early_stopping_looks_at_its_own_evaluation_only() -> None:
    stopping = EarlyStopping("test/x", mode="min")
    run = simulate([stopping], metrics={"eval/x": [1.0, 9.0, 9.0], "test/x": [3.0, 2.0, 1.0]})
    assert run.progress.epoch == 3


def test_early_stopping_does_not_mind_an_evaluation_on_request() -> None:
    callbacks = [Evaluate(tiny_loader(1)), EarlyStopping("eval/loss", mode="min", patience=3)]
    trainer = tiny_trainer(callbacks=callbacks, epochs=2)
    trainer.fit()
    before = callbacks[1].state_dict()
    trainer.evaluate(tiny_loader(1), compute=lambda model, batch: {"predictions": 1})
    trainer.evaluate(tiny_loader(1))
    assert callbacks[1].state_dict() == before


@pytest.mark.parametrize("patience", [0, -1, 1.5])
def test_early_stopping_needs_patience(patience: Any) -> None:
    with pytest.raises(ValueError, match="patience must be a whole number of at least 1; got"):
        EarlyStopping("eval/x", mode="min", patience=patience)
    with pytest.raises(ValueError, match=r"min_delta must be 0 or more; got -0\.1"):
        EarlyStopping("eval/x", mode="min", min_delta=-0.1)


# -- ClipGradients ------------------------------------------------------------------------------------


def gradients_after(clip: Callback, **arguments: Any) -> Tensor:
    seen: list[Tensor] = []

    @on(Callback.on_after_optimizer_step)
    def look(run: Run) -> None:
        seen.append(torch.cat([one.grad.flatten() for one in run.model.parameters() if one.grad is not None]))

    tiny_run(callbacks=[clip, look], steps=1, **arguments)
    return seen[0]


def test_gradients_are_scaled_down_to_their_norm_together() -> None:
    clip = ClipGradients(max_norm=0.5)
    free, clipped = gradients_after(Callback()), gradients_after(clip)
    assert clip.norm is not None
    torch.testing.assert_close(clip.norm, free.norm())
    torch.testing.assert_close(clipped, free * 0.5 / free.norm(), rtol=1e-4, atol=1e-6)


def test_gradients_are_cut_off_by_value() -> None:
    free, clipped = gradients_after(Callback()), gradients_after(ClipGradients(max_value=0.65))
    torch.testing.assert_close(clipped, free.clamp(-0.65, 0.65))
    assert not torch.equal(clipped, free)


def test_gradients_are_clipped_once_a_step_when_they_are_complete() -> None:
    whole = gradients_after(ClipGradients(max_norm=0.5), batches=1, loader=tiny_loader(1, batch_size=4))
    parts = gradients_after(ClipGradients(max_norm=0.5), accumulate=2, loader=tiny_loader(2, batch_size=2))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 1.0, "max_value": 1.0}])
def test_clipping_takes_one_of_two(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected one of max_norm and max_value; got max_norm="):
        ClipGradients(**arguments)
    with pytest.raises(ValueError, match="max_norm must be greater than 0; got 0"):
        ClipGradients(0)


# -- LearningRate -------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def rate_after(run: Run) -> float:
    return cast("float", run.optimizers[0].param_groups[0]["lr"])


def test_a_schedule_moves_with_each_step_or_each_epoch() -> None:
    assert rate_after(tiny_run(callbacks=[LearningRate(halving)], steps=3)) == pytest.approx(0.1 / 8)
    assert rate_after(tiny_run(callbacks=[LearningRate(halving, per="epoch")], epochs=3)) == pytest.approx(0.1 / 8)


def test_an_epoch_cut_short_does_not_move_a_schedule_per_epoch() -> None:
    assert rate_after(tiny_run(callbacks=[LearningRate(halving, per="epoch")], steps=7)) == pytest.approx(0.05)


def test_a_scheduler_may_be_given_as_it_is() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tiny_run(model=model, optimizer=optimizer, callbacks=[LearningRate(halving(optimizer))], steps=2)
    assert rate_after(run) == pytest.approx(0.025)


def test_a_plateau_is_told_the_result_after_each_evaluation() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    run = simulate([LearningRate(plateau, monitor="eval/loss")], metrics={"eval/loss": [3.0, 3.0, 2.0, 2.0]})
    assert rate_after(run) == pytest.approx(0.025)


def test_an_evaluation_on_request_does_not_move_a_schedule() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    trainer = tiny_trainer(callbacks=[Evaluate(tiny_loader(1)), LearningRate(plateau, monitor="eval/loss")])
    trainer.evaluate(tiny_loader(1))  # before any fit
    run = trainer.fit()
    before = rate_after(run)
    trainer.evaluate(tiny_loader(1))
    trainer.evaluate(tiny_loader(1))
    assert rate_after(run) == before


def test_the_second_of_two_optimizers_can_have_its_own_schedule() -> None:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.1)]

    run = tiny_run(optimizer=two, callbacks=[LearningRate(halving, optimizer=1)], steps=1)
    assert [one.param_groups[0]["lr"] for one in run.optimizers] == [0.1, 0.05]


def test_wrong_schedules_are_errors() -> None:
    strange = halving(torch.optim.SGD(tiny_model().parameters(), 0.1))
    with pytest.raises(ValueError, match="scheduler belongs to an optimizer that this run does not have"):
        tiny_run(callbacks=[LearningRate(strange)])
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a result to look at"):
        tiny_run(callbacks=[LearningRate(ReduceLROnPlateau)])
    with pytest.raises(ValueError, match="monitor= is for ReduceLROnPlateau; StepLR looks at no result"):
        tiny_run(callbacks=[Evaluate(tiny_loader(1)), LearningRate(halving, monitor="eval/loss")])
    with pytest.raises(TypeError, match="LearningRate's function must return a torch scheduler; got None"):
        tiny_run(callbacks=[LearningRate(cast("Any", lambda optimizer: None))])
    with pytest.raises(ValueError, match="per must be 'step' or 'epoch'; got 'batch'"):
        LearningRate(halving, per=cast("Any", "batch"))
    with pytest.raises(MonitorError, match="LearningRate watches 'eval/loss', but no evaluation will report it"):
        tiny_run(callbacks=[LearningRate(ReduceLROnPlateau, monitor="eval/loss")])


# -- StopOnNonFinite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_weights(bad: float) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss * next(factors)

    recorder = Recorder(Callback.on_after_backward)
    factors = iter([1.0, bad, 1.0])
    run = tiny_run(compute_loss=compute_loss, callbacks=[StopOnNonFinite("skip"), recorder], batches=3)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    assert len(recorder.names) == 2
    assert run.why("batch skipped").endswith(f"the loss is {bad}")


def test_it_stops_or_raises_if_that_is_wanted() -> None:
    run = tiny_run(losses=[1.0, math.nan, 1.0], callbacks=[StopOnNonFinite()])
    assert run.outcome is not None
    assert (run.outcome.kind, run.progress.step) == ("stopped", 2)
    with pytest.raises(NonFiniteError, match=r"the loss is nan in batch 2\. Lower the learning rate"):
        tiny_run(losses=[1.0, math.nan], callbacks=[StopOnNonFinite("raise")])
    with pytest.raises(ValueError, match="action must be 'stop', 'raise' or 'skip'; got 'ignore'"):
        StopOnNonFinite(cast("Any", "ignore"))


# -- TimeLimit, Limit, LogTraining --------------------------------------------------------------------


def test_a_time_limit_is_taken_at_the_end_of_a_step() -> None:
    recorder = Recorder()
    run = tiny_run(callbacks=[recorder, TimeLimit("0.000001 s")], epochs=3)
    assert recorder.names[-4:] == ["on_step_end", "on_stop", "on_epoch_end", "on_fit_end"]
    assert run.progress.step == 1


def test_a_time_limit_that_is_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'a time limit is written "90 s", "30 min" or "2 h"; got \'5 steps\''):
        TimeLimit("5 steps")
    with pytest.raises(CadenceError, match="unknown unit 'parsecs'"):
        TimeLimit("12 parsecs")


def test_a_limit_shortens_epochs_and_evaluations_and_leaves_the_loaders_alone() -> None:
    seen: list[int | None] = []
    evaluate = Evaluate(tiny_loader(5))
    look = on(Callback.on_eval_batch_end)(lambda run, evaluation, *_: seen.append(evaluation.batch))
    run = tiny_run(callbacks=[Limit(train=2, evaluation=3), evaluate, look], epochs=2, batches=9)
    assert run.progress.batch == 4
    assert run.progress.epoch == 2
    assert seen == [1, 2, 3, 1, 2, 3]
    assert evaluate.evaluation.limit is None


def test_a_limit_never_lengthens() -> None:
    results: list[int] = []
    keep = on(Callback.on_eval_end)(lambda run, evaluation: results.append(evaluation.batch))
    tiny_run(callbacks=[Limit(evaluation=3), Evaluate(tiny_loader(5), limit=1), keep])
    assert results == [1]


@pytest.mark.parametrize("arguments", [{"train": 0}, {"evaluation": -1}, {"train": 1.5}])
def test_a_limit_below_one_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))} must be a whole number of at least 1, or None; got"):
        Limit(**arguments)


def test_training_is_logged_with_loss_rate_and_speed() -> None:
    run = tiny_run(callbacks=[LogTraining(every="2 steps")], losses=[1.0, 2.0, 3.0, 4.0], accumulate=1)
    assert run.history["train/loss"] == [(2, 2.0), (4, 4.0)]
    assert run.history["train/lr"] == [(2, 0.1), (4, 0.1)]
    assert all(value > 0 for _, value in run.history["train/samples_per_s"] + run.history["train/steps_per_s"])


def test_other_outputs_are_logged_by_name_and_each_group_has_its_rate() -> None:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.2)]

    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean(), "size": len(batch[0])}

    log = LogTraining(every="1 step", outputs=("size",), throughput=False, prefix="t")
    run = tiny_run(callbacks=[log], optimizer=two, compute_loss=compute_loss, steps=1)
    assert run.history.latest == {"t/size": 2, "t/lr/0": 0.1, "t/lr/1": 0.2}


def test_outputs_given_as_one_text_are_an_error() -> None:
    with pytest.raises(TypeError, match=r'outputs must be a sequence of names, such as \("loss",\); got the text \'loss\''):
        LogTraining(outputs="loss")
