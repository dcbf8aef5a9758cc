"""Callbacks of pytorch-accelerated in a native trainer, beside native ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, StopOnNonFinite
from cadenza.compat.accelerated.callbacks import (
    EarlyStoppingCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from cadenza.compat.accelerated.events import EVENTS
from cadenza.engine.session import session_of
from cadenza.testing import Recorder, prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.compat.accelerated.parts import Again, Hooks, Noting, data, metrics_of, train, trainer_of

MEAN_SQUARE = supervised(nn.functional.mse_loss)


def test_the_order_of_events_is_that_of_the_adapter_s_trainer() -> None:
    native, own = Noting(), Noting()
    run = tiny_run(callbacks=[native, Evaluate(tiny_loader(2))], epochs=2, batches=3, compute_loss=MEAN_SQUARE)
    trainer = train(trainer_of(callbacks=[own]), 2, data(3), data(2))
    assert native.log == own.log
    assert [epoch for _, _, epoch in native.seen] == [epoch for _, _, epoch in own.seen]
    assert [sorted(keywords) for _, keywords, _ in native.seen] == [sorted(keywords) for _, keywords, _ in own.seen]
    metrics = metrics_of(session_of(run).adapters["accelerated"].trainer)
    assert metrics["train_loss_epoch"] == metrics_of(trainer)["train_loss_epoch"]
    assert metrics["eval_loss_epoch"] == pytest.approx(metrics_of(trainer)["eval_loss_epoch"])
    assert set(EVENTS) - set(native.log) == {"on_evaluation_run_start", "on_evaluation_run_end", "on_stop_training_error"}


def test_the_steps_end_before_the_evaluation_and_the_epoch_ends_after_it_for_all_callbacks() -> None:
    noting, again, between = Noting(), Again(), Noting()
    again.log = noting.log
    tiny_run(callbacks=[noting, Evaluate(tiny_loader(1)), again], batches=1)
    start = noting.log.index("on_train_epoch_end")
    evaluation = ["on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"]
    events = ["on_train_epoch_end", *evaluation, "on_training_run_epoch_end", "on_training_run_end"]
    assert noting.log[start:] == [event for event in events for _ in range(2)]
    tiny_run(callbacks=[Evaluate(tiny_loader(1), every="2 steps"), between], batches=4)
    assert [end["is_intermediate"] for end in between.of("on_eval_epoch_end")] == [True, True]


def test_an_evaluation_without_a_training_is_an_evaluation_run() -> None:
    noting = Noting()
    result = tiny_trainer(callbacks=[noting], compute_loss=MEAN_SQUARE).evaluate(tiny_loader(1))
    step = ["on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"]
    assert noting.log == ["on_evaluation_run_start", *step, "on_evaluation_run_end"]
    assert result["eval/loss"] > 0


def test_with_a_step_fn_each_batch_ends_once() -> None:
    def step(run: Run, batch: Any) -> Any:
        for _ in range(2):
            run.backward(nn.functional.mse_loss(run.model(batch[0]), batch[1]))
        run.update()
        return torch.tensor(1.0)

    noting = Noting()
    tiny_run(callbacks=[noting], batches=3, step_fn=step)
    assert [end["step"] for end in noting.of("on_train_step_end")] == [0, 1, 2]


def test_the_trainer_argument_shows_the_run_with_the_names_of_pytorch_accelerated() -> None:
    class Look(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            seen["outputs"] = sorted(batch_output)
            seen["sizes"] = (batch_output["batch_size"], tuple(batch_output["model_outputs"].shape))

        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            seen["config"] = trainer.run_config.to_dict()
            seen["gathered"] = trainer.gather(torch.ones(2)).tolist()
            seen["scheduler"] = type(trainer.scheduler).__name__
            seen["parts"] = (trainer.model is trainer.get_model(), trainer.device.type, len(trainer._train_dataloader))
            trainer._accelerator.wait_for_everyone()

    seen: dict[str, Any] = {}
    schedule = LearningRate(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    tiny_run(callbacks=[Look(), schedule], batches=4, accumulate=2, epochs=3, compute_loss=MEAN_SQUARE)
    assert seen["outputs"] == ["batch_size", "loss", "model_outputs", "predictions", "targets"]
    assert seen["sizes"] == (2, (2, 1))
    config = seen["config"]
    assert (config["num_epochs"], config["gradient_accumulation_steps"], config["max_num_train_steps"]) == (3, 2, 6)
    assert (seen["gathered"], seen["scheduler"], seen["parts"]) == ([1.0, 1.0], "ExponentialLR", (True, "cpu", 4))


def test_a_stop_ends_the_native_run_as_a_stop_and_drops_the_batch() -> None:
    class Stop(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int = 0, **kwargs: Any) -> None:
            if step == 2:
                raise StopTrainingError("enough")

    noting, again, recorder = Noting(), Again(), Recorder(Callback.on_after_optimizer_step)
    run = tiny_run(callbacks=[noting, Stop(), again, recorder], epochs=3)
    assert [seen.at.step for seen in recorder.seen] == [0, 1]
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")
    assert run.why("stopped").startswith("stopped by Stop at epoch 0, step 2")
    assert noting.log[-3:] == ["on_train_step_end", "on_stop_training_error", "on_training_run_end"]
    assert again.log[-3:] == ["on_train_step_start", "on_stop_training_error", "on_training_run_end"]


def test_a_loss_that_is_not_finite_is_a_stop_of_a_native_callback_and_ends_the_process_by_an_adapted_one() -> None:
    noting, losses = Noting(), [1.0, float("nan"), 1.0]
    tiny_run(callbacks=[StopOnNonFinite(), noting], losses=losses)
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert len(noting.of("on_train_step_end")) == 2
    with pytest.raises(SystemExit, match="nan"):
        tiny_run(callbacks=[TerminateOnNaNCallback()], losses=losses)


def test_an_error_also_in_a_native_callback_ends_all_events_and_a_callback_that_may_fail_is_disabled() -> None:
    def broken(*_: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    native, adapted, own, disabled = on(Callback.on_step_end)(broken), Hooks(on_train_epoch_end=broken), Noting(), Noting()
    for callback, last in ((native, "on_train_step_end"), (adapted, "on_train_epoch_end")):
        noting = Noting()
        with pytest.raises(RuntimeError, match="broken"):
            tiny_run(callbacks=[noting, callback])
        assert noting.log[-1] == last
    with pytest.raises(RuntimeError, match="broken"):
        train(trainer_of(callbacks=[own, native]), 1, data(2))
    assert own.log[-1] == "on_train_step_end"
    adapted.on_fault = "disable"
    run = tiny_run(callbacks=[disabled, adapted])
    assert [fault.callback for fault in run.faults] == ["Hooks"]
    assert disabled.log[-1] == "on_training_run_end"


def test_built_in_callbacks_watch_native_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Rising:
        def __init__(self) -> None:
            self.value = 3.0

        def update(self, predictions: Any, targets: Any) -> None:
            pass

        def compute(self) -> float:
            self.value -= 1.0 if self.value > 1.0 else -5.0
            return self.value

        def reset(self) -> None:
            pass

    stop = EarlyStoppingCallback(watch_metric="eval/rank", early_stopping_patience=1)
    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="eval/rank")
    evaluate = Evaluate(tiny_loader(2), metrics={"rank": Rising()})
    run = tiny_run(callbacks=[best, stop, LogMetricsCallback(), evaluate], epochs=9, compute_loss=MEAN_SQUARE)
    assert run.progress.epoch == 3
    assert (best.best_metric, best.best_metric_epoch) == (1.0, 2)
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert saved["model_state_dict"]["weight"].item() == next(run.model.parameters()).item()
    assert "eval/rank: 1.0" in capsys.readouterr().out


def test_averages_and_evaluations_between_steps_work_on_native_evaluations(tmp_path: Path) -> None:
    noting = Noting()
    ema = ModelEmaCallback(0.5, save_path=tmp_path / "ema.pt")
    adapted = [StepBasedEvaluationCallback(2), LimitEvalStepsCallback(1), ema, noting]
    run = tiny_run(callbacks=[Evaluate(tiny_loader(2)), *adapted], epochs=2, compute_loss=MEAN_SQUARE)
    metrics = metrics_of(session_of(run).adapters["accelerated"].trainer)
    assert len(metrics["ema_model_eval_loss_epoch"]) == len(metrics["eval_loss_epoch"]) == 2
    assert [end["is_intermediate"] for end in noting.of("on_eval_epoch_end")] == [True, True, False] * 2
    assert len(noting.of("on_eval_step_end")) == 2 * (1 + 1 + 2)


def test_a_checkpoint_offers_the_average_by_name(tmp_path: Path) -> None:
    ema = ModelEmaCallback(0.5, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = tiny_trainer(directory=tmp_path / "run", callbacks=[ema, Checkpoint()], epochs=3)
    trainer.fit()
    assert ema.ema_model is not None
    load_weights(tmp_path / "run", model := tiny_model(), weights="ema_model")
    assert torch.equal(model.weight, ema.ema_model.module.get_parameter("weight"))
    assert not torch.equal(model.weight, trainer.model.get_parameter("weight"))
    stored = trainer.evaluate(tiny_loader(), which="last", weights="ema_model")
    assert trainer.evaluate(tiny_loader(), weights="ema_model") == stored


def test_a_resumed_run_with_these_callbacks_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(directory: Any) -> Any:
        adapted = [EarlyStoppingCallback(9), SaveBestModelCallback("best.pt"), ModelEmaCallback(0.5)]
        callbacks = [Evaluate(tiny_loader(2)), *adapted]
        return tiny_trainer(callbacks=callbacks, epochs=3, seed=1, directory=directory, compute_loss=MEAN_SQUARE)

    monkeypatch.chdir(tmp_path)
    prove_resume(make, at=[2, 5, 7, 14], in_process=True)


def test_a_callback_without_events_costs_a_native_run_nothing() -> None:
    class Idle(TrainerCallback):
        def verify(self, trainer: Any) -> None:
            """An event of its own."""

    assert Idle().listeners() == []
