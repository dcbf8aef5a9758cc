"""`LearningRate`, `TimeLimit`, `Limit` and `LogTraining`; the other callbacks have a file each."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, LearningRate, Limit, LogTraining, TimeLimit
from cadenza.engine.session import session_of
from cadenza.errors import MonitorError, OutputError, ScheduleError
from cadenza.testing import Recorder, simulate, tiny_loader, tiny_model, tiny_run, tiny_trainer

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


def test_a_plateau_gets_the_result_after_each_evaluation() -> None:
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
    with pytest.raises(ValueError, match="scheduler of LearningRate belongs to an optimizer that this run does not have"):
        tiny_run(callbacks=[LearningRate(strange)])
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a result; got none"):
        tiny_run(callbacks=[LearningRate(ReduceLROnPlateau)])
    with pytest.raises(ValueError, match="monitor= is for ReduceLROnPlateau; got a StepLR, which reads no result"):
        tiny_run(callbacks=[Evaluate(tiny_loader(1)), LearningRate(halving, monitor="eval/loss")])
    with pytest.raises(
        TypeError, match="the function of LearningRate must return a scheduler of torch, transformers or timm; got None"
    ):
        tiny_run(callbacks=[LearningRate(cast("Any", lambda optimizer: None))])
    with pytest.raises(ValueError, match="per must be 'step' or 'epoch'; got 'batch'"):
        LearningRate(halving, per=cast("Any", "batch"))
    with pytest.raises(MonitorError, match="LearningRate watches 'eval/loss', but no evaluation will report it"):
        tiny_run(callbacks=[LearningRate(ReduceLROnPlateau, monitor="eval/loss")])


# -- TimeLimit, Limit, LogTraining --------------------------------------------------------------------


def test_a_time_limit_is_taken_at_the_end_of_a_step() -> None:
    recorder = Recorder()
    run = tiny_run(callbacks=[recorder, TimeLimit("0.000001 s")], epochs=3)
    assert recorder.names[-4:] == ["on_step_end", "on_stop", "on_epoch_end", "on_fit_end"]
    assert run.progress.step == 1


def test_a_time_limit_that_is_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'duration must be a time such as "90 s", "30 min" or "2 h"; got \'5 steps\''):
        TimeLimit("5 steps")
    with pytest.raises(ScheduleError, match="unknown unit 'parsecs'"):
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
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))} must be None or a whole number of at least 1; got"):
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
    with pytest.raises(TypeError, match=r'outputs must be a sequence of names, such as \("loss",\); got \'loss\''):
        LogTraining(outputs="loss")


def test_the_rate_that_is_logged_is_the_one_of_the_next_update_with_all_factors() -> None:
    class Double(Callback):
        def on_setup(self, run: Run) -> None:
            session_of(run).rates.factors[0] = [lambda step: 2.0 * step]

    run = tiny_run(callbacks=[Double(), LearningRate(halving), LogTraining("1 step", throughput=False)], steps=2)
    assert dict(run.history["train/lr"]) == pytest.approx({1: 0.05 * 4, 2: 0.025 * 6})


def test_a_batch_that_was_skipped_has_no_outputs_to_log() -> None:
    @on(Callback.on_batch_start, at=2)
    def skip(run: Run, batch: Any) -> None:
        run.skip_batch("not this one")

    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean(), "size": len(batch[0])}

    log = LogTraining("1 step", outputs=("loss", "size"), throughput=False)
    run = tiny_run(callbacks=[skip, log], compute_loss=compute_loss, steps=3)
    assert [step for step, _ in run.history["train/loss"]] == [1, 3]
    assert run.history["train/size"] == [(1, 2), (3, 2)]


def test_an_output_that_no_batch_has_is_an_error() -> None:
    with pytest.raises(OutputError, match=r"the batch has no output 'los'; it has \['loss'\]\. Did you mean 'loss'\?"):
        tiny_run(callbacks=[LogTraining("1 step", outputs=("los",))])
