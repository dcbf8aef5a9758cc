"""A18 and the other built-in callbacks, subclasses of them, helpers of scripts; and all of them in a native trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, StopOnNonFinite
from cadenza.compat.accelerated import callbacks, utils
from cadenza.compat.accelerated.callbacks import LimitEvalStepsCallback, ModelEmaCallback, StopTrainingError, TrainerCallback
from cadenza.compat.accelerated.events import EVENTS
from cadenza.compat.accelerated.finetuning import BN_MODULES, ModelFreezer
from cadenza.compat.accelerated.trainer import DEFAULT_CALLBACKS, Trainer
from cadenza.compat.accelerated.utils import LIMIT_BATCHES_ENV_VAR, LimitBatches, ModelEma, remove_padding
from cadenza.engine.session import session_of
from cadenza.testing import Recorder, check_callback, prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.compat.accelerated import parts
from tests.compat.accelerated.parts import Noting, Scripted, ScriptedTrainer, data, metrics_of, train, trainer_of, weights_of


def test_the_default_callbacks_are_these_in_this_order_and_print_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["MoveModulesToDevice", "TerminateOnNaN", "PrintProgress", "ProgressBar", "LogMetrics"]
    assert [kind.__name__ for kind in DEFAULT_CALLBACKS] == [f"{kind}Callback" for kind in kinds]
    assert callbacks.get_default_callbacks() == DEFAULT_CALLBACKS
    without_bar = [f"{kind}Callback" for kind in kinds if kind != "ProgressBar"]
    assert [kind.__name__ for kind in callbacks.get_default_callbacks(progress_bar=False)] == without_bar
    linear = nn.Linear(1, 1)
    trainer = Trainer(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1))
    assert trainer.callback_handler.callback_list == [f"{kind}Callback" for kind in kinds]
    trainer = trainer_of(callbacks=DEFAULT_CALLBACKS)
    train(trainer, 2, data(3), data(2))
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line and "steps/s" not in line]
    names = [line.partition(":")[0] for line in lines]
    epoch = ["train_loss_epoch", "Starting eval epoch", "eval_loss_epoch"]
    run = ["Starting training run", "Starting epoch 1", *epoch, "Starting epoch 2", *epoch, "Finishing training run"]
    assert names == run
    assert "step 6/6" in shown  # the progress bar


def test_a18_a_limit_in_the_environment_adds_a_callback_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    noting = Noting()
    with LimitBatches(2):
        trainer = trainer_of(callbacks=[noting])
        trainer_of(callbacks=[callbacks.PrintProgressCallback])
    assert trainer.callback_handler.callback_list == ["LimitBatchesCallback", "Noting"]
    train(trainer, 1, data(5), data(5))
    assert noting.log.count("on_train_step_end") == noting.log.count("on_eval_step_end") == 2
    assert LIMIT_BATCHES_ENV_VAR not in os.environ
    for off in ("None", "none", ""):
        monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, off)
        assert trainer_of().callback_handler.callback_list == []
    beyond, noting = parts.noting_trainer(callbacks.LimitBatchesCallback(50))
    train(beyond, 1, data(5), gradient_accumulation_steps=2)
    assert noting.log.count("[optimizer_step]") == 3  # a limit beyond the loader applies the last short window
    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, "few")
    with pytest.raises(ValueError, match=LIMIT_BATCHES_ENV_VAR):
        trainer_of()


def test_intermediate_evaluations_run_after_batches_3_5_and_7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes: list[bool] = []
    metrics: list[set[str]] = []
    look = parts.Hooks(
        on_train_step_start=lambda trainer, **_: modes.append(trainer.model.training),
        on_eval_epoch_end=lambda trainer, **_: metrics.append(trainer.run_history.get_metric_names()),
    )
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    trainer, noting = parts.noting_trainer(callbacks.StepBasedEvaluationCallback(2), ema, look)
    train(trainer, 1, data(7), data(2))
    steps = [name for name in noting.log if name in ("on_train_step_end", "on_eval_epoch_start")]
    assert "".join("e" if "eval" in name else "." for name in steps) == "...e..e..ee"
    assert [end["is_intermediate"] for end in noting.of("on_eval_epoch_end")] == [True, True, True, False]
    assert modes == [True] * 7
    assert metrics[:3] == [{"intermediate_eval_loss"}] * 3
    assert metrics_of(trainer).keys() == {"train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"}
    plain = train(trainer_of(), 1, data(7), data(2))
    assert torch.equal(weights_of(trainer), weights_of(plain))
    assert metrics_of(trainer)["train_loss_epoch"] == metrics_of(plain)["train_loss_epoch"]
    capsys.readouterr()
    train(trainer_of(callbacks=[LimitEvalStepsCallback(1), callbacks.StepBasedEvaluationCallback(2)]), 1, data(5), data(2))
    limited = "Limiting evaluation to 1 steps per process"
    told = [["", f"Running evaluation after {step} training steps", limited, "", "Resuming training..."] for step in (2, 4)]
    assert capsys.readouterr().out.splitlines() == [*told[0], *told[1]]


@pytest.mark.parametrize(("only", "steps"), [(True, 1 + 1 + 3), (False, 1 + 1 + 1)])
def test_a_limit_applies_to_intermediate_evaluations_or_to_all(only: bool, steps: int) -> None:
    noting = Noting()
    limit = LimitEvalStepsCallback(1, limit_intermediate_only=only)
    train(trainer_of(callbacks=[callbacks.StepBasedEvaluationCallback(2), limit, noting]), 1, data(5), data(3))
    assert noting.log.count("on_eval_step_end") == steps


def test_modules_of_the_trainer_are_moved_to_the_device_but_the_driver_moves_the_model() -> None:
    class Moved(nn.Module):
        def to(self, *arguments: Any, **keywords: Any) -> Any:
            moved.append((self, *arguments))
            return self

    class Some(callbacks.MoveModulesToDeviceCallback):
        def _get_modules(self, trainer: Any) -> list[tuple[str, nn.Module]]:
            return [(name, one) for name, one in super()._get_modules(trainer) if name == "teacher"]

    for kind, names in ((callbacks.MoveModulesToDeviceCallback, ["teacher", "student"]), (Some, ["teacher"])):
        moved: list[Any] = []
        trainer: Any = trainer_of(callbacks=[kind])
        trainer.loss_func, trainer.teacher, trainer.student = nn.MSELoss(), Moved(), Moved()
        train(trainer, 1, data(1))
        trainer.evaluate(data(1), dataloader_kwargs=parts.HERE)
        assert moved == [(getattr(trainer, name), trainer.device) for name in names] * 2


WITHOUT = {"TrainerCallback", "WSDCheckpointCallback"}  # the second one needs a WSD schedule
NAMES = [name for name in callbacks.__all__ if name.endswith("Callback") and name not in WITHOUT]
ARGUMENTS = {"LimitBatchesCallback": [3], "LimitEvalStepsCallback": [2], "StepBasedEvaluationCallback": [2]}


@pytest.mark.parametrize("name", NAMES)
def test_each_callback_keeps_the_contract_of_native_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_callback(lambda: getattr(callbacks, name)(*ARGUMENTS.get(name, [])), reads=True)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(kind, 0) for kind in (callbacks.StepBasedEvaluationCallback, callbacks.LimitBatchesCallback)),
        *(partial(kind, 0) for kind in (LimitEvalStepsCallback, LimitBatches)),
        lambda: callbacks.SaveTrainingStateCallback(save_every_n_epochs=0),
        lambda: callbacks.EarlyStoppingCallback(early_stopping_threshold=-1),
    ],
)
def test_a_wrong_number_is_an_error_in_the_constructor(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        make()


def test_a_callback_need_not_call_the_constructor_of_its_base_class() -> None:
    class Own(callbacks.SaveBestModelCallback):
        def __init__(self) -> None:  # as the documents' own loggers do
            self.seen = 0

        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen += 1
            raise StopTrainingError("reached")

        on_training_run_end = on_training_run_epoch_end = TrainerCallback.on_training_run_end

        def state_dict(self) -> dict[str, Any]:
            return {}

    own = Own()
    with pytest.raises(StopTrainingError, match="reached"):
        train(trainer_of(callbacks=[own]), 1, data(1))
    assert own.seen == 1


# -- subclasses ---------------------------------------------------------------------------------------------------


def test_a_subclass_may_choose_the_best_model_itself(tmp_path: Path) -> None:
    class Mine(callbacks.SaveBestModelCallback):
        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            value = trainer.run_history.get_latest_metric(self.watch_metric)
            if self.best_metric is None or self.operator(value, self.best_metric):
                self.best_metric, self.best_metric_epoch = value, trainer.run_history.current_epoch
                trainer.save_checkpoint(self.save_path)

    best = Mine(tmp_path / "best.pt", watch_metric="train_loss_epoch", greater_is_better=True)
    trainer = trainer_of(ScriptedTrainer, [best])
    for loss in (1.0, 2.0):  # the second training starts without a best value
        train(trainer, 1, Scripted(loss), batch_size=1)
        assert (best.best_metric, best.best_metric_epoch) == (loss, 1)
    for greater in (False, True):
        stop = callbacks.EarlyStoppingCallback(greater_is_better=greater)
        assert stop.operator(3.0, 2.0) is greater
        for value in (None, 2.0, None):
            stop.best_metric = value
            assert stop.best_metric == value


def test_a_subclass_may_trigger_the_end_of_the_process_or_collect_the_metrics() -> None:
    class Large(callbacks.TerminateOnNaNCallback):
        def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
            self.check_for_nan_after_batch(batch_output, step="training")
            if batch_output["loss"] > 5:
                self.triggered = True
                raise StopTrainingError("too large")

    large = Large()
    with pytest.raises(SystemExit, match="The training was ended"):
        train(trainer_of(ScriptedTrainer, [large]), 1, Scripted(1.0, 9.0), batch_size=1)
    assert large.triggered
    with pytest.raises(StopTrainingError, match="in a validation step"):
        large.check_for_nan_after_batch({"loss": torch.tensor([1.0, float("inf")])}, step="validation")

    class Rounded(callbacks.LogMetricsCallback):
        def _get_latest_metrics(self, trainer: Any, metric_names: Any) -> dict[str, Any]:
            return {name: round(value) for name, value in super()._get_latest_metrics(trainer, metric_names).items()}

        def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
            logged.append(metrics)

    logged: list[dict[str, Any]] = []
    train(trainer_of(ScriptedTrainer, [Rounded]), 1, Scripted(1.2), Scripted(2.8), batch_size=1)
    assert logged == [{"train_loss_epoch": 1}, {"eval_loss_epoch": 3}]


def test_training_states_know_how_many_batches_there_were(tmp_path: Path) -> None:
    saving = callbacks.SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, max_checkpoints=2)
    trainer = trainer_of(callbacks=[saving])
    train(trainer, 1, data(5))
    assert saving._global_step == 5
    assert saving._saved_checkpoints == [tmp_path / "step_4", tmp_path / "final"]
    assert trainer.load_training_state(tmp_path / "step_4")["global_step"] == 4
    saving.on_train_step_end(trainer, step=5)  # the arguments of the original
    assert saving._global_step == 6


def test_an_average_may_have_its_own_formula_for_each_tensor_and_change_its_decay(tmp_path: Path) -> None:
    class Newest(ModelEma):
        def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
            return updated_model_weights * 2

    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", model_ema=Newest)
    assert ema.callback_handler.callbacks == []
    trainer = train(trainer_of(callbacks=[ema]), 2, data(2))
    average = ema.ema_model
    assert average is not None
    for factor in (2, 1):
        averaged = torch.cat([one.flatten() for one in average.module.state_dict().values()])
        assert torch.equal(averaged, factor * weights_of(trainer))
        average.set(trainer.model)
    assert ModelEma(nn.Linear(1, 1), decay=0.75).update_fn(torch.tensor(4.0), torch.tensor(8.0)).item() == 5.0
    wrong: Any = nn.Linear
    with pytest.raises(TypeError, match=r"model_ema must be ModelEma or a subclass; got <class '.*Linear'>"):
        ModelEmaCallback(save_path=tmp_path / "ema.pt", model_ema=wrong)

    class Ramp(ModelEma):
        def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
            super().__init__(model, decay)
            self.decay = 0.0

        def update(self, model: nn.Module) -> None:
            super().update(model)
            self.decay = 0.75

    linear = nn.Linear(1, 1, bias=False)
    average = Ramp(linear)
    for weight, expected in ((4.0, 4.0), (8.0, 0.75 * 4 + 0.25 * 8)):
        nn.init.constant_(linear.weight, weight)
        average.update(linear)
        assert next(average.module.parameters()).item() == expected


def test_a_freezer_freezes_groups_and_returns_the_unfrozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()), nn.Linear(2, 1))
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, True, False]
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False, True, False]
    assert [layer.layer_group_idx for layer in freezer.get_layers()] == [(0, -3), (1, -2), (1, -2), (1, -2), (2, -1)]
    trainable = freezer.get_trainable_parameters()
    assert len(trainable) == len(list(trainable)) == 4  # BatchNorm stays trainable
    assert nn.BatchNorm1d in BN_MODULES
    unfrozen = freezer.unfreeze(to_index=1)
    assert {index: len(group["params"]) for index, group in unfrozen.items()} == {1: 2}
    assert not model[0].weight.requires_grad
    assert ModelFreezer(model, freeze_batch_norms=True).get_layers()[0].is_frozen is False
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got 3"):
        ModelFreezer(3)  # type: ignore[arg-type]  # the error at hand
    with pytest.raises(IndexError, match="3 groups"):
        freezer.freeze(to_index=3)


def test_helpers_remove_rows_of_padding_slice_loaders_and_seed_workers() -> None:
    assert remove_padding(torch.tensor([1, -1, 2, -1]), -1).tolist() == [1, 2]
    assert remove_padding(torch.tensor([[[-1, -1]], [[-1, 2]]]), -1).tolist() == [[[-1, 2]]]
    assert remove_padding(torch.zeros(0, 4), -1).shape == (0, 4)
    trainer = trainer_of()
    nothing, rows = torch.full((1, 3), -1.0), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    assert trainer.gather(nothing, padding_value=-1).shape == (0, 3)
    assert trainer.gather(rows, padding_value=-1).tolist() == [[1.0, -1.0]]
    assert trainer.gather(rows) is rows
    with pytest.raises(TypeError, match="with a padding_value needs a tensor; got a list"):
        trainer.gather([rows], padding_value=-1)
    batches = utils.DataLoaderSlice(range(5), 3)
    assert [*batches] == [*batches] == [0, 1, 2]
    assert (len(batches), len(utils.DataLoaderSlice(range(2), 3))) == (3, 2)
    before = torch.get_rng_state()
    assert utils.worker_init_fn(3) == torch.initial_seed() + 3
    assert torch.equal(torch.get_rng_state(), before)


# -- in a native trainer -----------------------------------------------------------------------------------

MEAN_SQUARE = supervised(nn.functional.mse_loss)


def test_the_order_of_events_is_that_of_the_adapter_s_trainer_and_with_a_step_fn_each_batch_ends_once() -> None:
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

    def step(run: Run, batch: Any) -> Any:
        for _ in range(2):
            run.backward(nn.functional.mse_loss(run.model(batch[0]), batch[1]))
        run.update()
        return torch.tensor(1.0)

    noting = Noting()
    tiny_run(callbacks=[noting], batches=3, step_fn=step)
    assert [end["step"] for end in noting.of("on_train_step_end")] == [0, 1, 2]


def test_the_steps_end_before_the_evaluation_and_the_epoch_after_it_and_it_may_run_without_a_training() -> None:
    noting, again, between = Noting(), parts.Again(), Noting()
    again.log = noting.log
    tiny_run(callbacks=[noting, Evaluate(tiny_loader(1)), again], batches=1)
    start = noting.log.index("on_train_epoch_end")
    evaluation = ["on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"]
    events = ["on_train_epoch_end", *evaluation, "on_training_run_epoch_end", "on_training_run_end"]
    assert noting.log[start:] == [event for event in events for _ in range(2)]
    tiny_run(callbacks=[Evaluate(tiny_loader(1), every="2 steps"), between], batches=4)
    assert [end["is_intermediate"] for end in between.of("on_eval_epoch_end")] == [True, True]
    noting = Noting()
    result = tiny_trainer(callbacks=[noting], compute_loss=MEAN_SQUARE).evaluate(tiny_loader(1))
    step = ["on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"]
    assert noting.log == ["on_evaluation_run_start", *step, "on_evaluation_run_end"]
    assert result["eval/loss"] > 0


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
    def stop(trainer: Any, step: int, **kwargs: Any) -> None:
        if step == 2:
            raise StopTrainingError("enough")

    noting, again, recorder = Noting(), parts.Again(), Recorder(Callback.on_after_optimizer_step)
    run = tiny_run(callbacks=[noting, parts.Hooks(on_train_step_end=stop), again, recorder], epochs=3)
    assert [seen.at.step for seen in recorder.seen] == [0, 1]
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough")
    assert run.why("stopped").startswith("stopped by Hooks at epoch 1, step 2")
    assert noting.log[-3:] == ["on_train_step_end", "on_stop_training_error", "on_training_run_end"]
    assert again.log[-3:] == ["on_train_step_start", "on_stop_training_error", "on_training_run_end"]


def test_a_loss_that_is_not_finite_is_a_stop_of_a_native_callback_and_ends_the_process_by_an_adapted_one() -> None:
    noting, losses = Noting(), [1.0, float("nan"), 1.0]
    tiny_run(callbacks=[StopOnNonFinite(), noting], losses=losses)
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert len(noting.of("on_train_step_end")) == 2
    with pytest.raises(SystemExit, match="nan"):
        tiny_run(callbacks=[callbacks.TerminateOnNaNCallback()], losses=losses)


def test_an_error_also_in_a_native_callback_ends_all_events_and_a_callback_that_may_fail_is_disabled() -> None:
    def broken(*_: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    native, adapted = on(Callback.on_step_end)(broken), parts.Hooks(on_train_epoch_end=broken)
    own, disabled = Noting(), Noting()
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

    stop = callbacks.EarlyStoppingCallback(watch_metric="eval/rank", early_stopping_patience=1)
    best = callbacks.SaveBestModelCallback(tmp_path / "best.pt", watch_metric="eval/rank")
    evaluate = Evaluate(tiny_loader(2), metrics={"rank": Rising()})
    run = tiny_run(callbacks=[best, stop, callbacks.LogMetricsCallback(), evaluate], epochs=9, compute_loss=MEAN_SQUARE)
    assert run.progress.epoch == 3
    assert (best.best_metric, best.best_metric_epoch) == (1.0, 2)
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert saved["model_state_dict"]["weight"].item() == next(run.model.parameters()).item()
    assert "eval/rank: 1.0" in capsys.readouterr().out


def test_averages_and_evaluations_between_steps_work_on_native_evaluations(tmp_path: Path) -> None:
    noting = Noting()
    ema = ModelEmaCallback(0.5, save_path=tmp_path / "ema.pt")
    adapted = [callbacks.StepBasedEvaluationCallback(2), LimitEvalStepsCallback(1), ema, noting]
    run = tiny_run(callbacks=[Evaluate(tiny_loader(2)), *adapted], epochs=2, compute_loss=MEAN_SQUARE)
    metrics = metrics_of(session_of(run).adapters["accelerated"].trainer)
    assert len(metrics["ema_model_eval_loss_epoch"]) == len(metrics["eval_loss_epoch"]) == 2
    assert [end["is_intermediate"] for end in noting.of("on_eval_epoch_end")] == [True, True, False] * 2
    assert len(noting.of("on_eval_step_end")) == 2 * (1 + 1 + 2)


def test_a_resumed_run_is_bit_identical_and_an_average_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ema = ModelEmaCallback(0.5, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = tiny_trainer(directory=tmp_path / "run", callbacks=[ema, Checkpoint()], epochs=3)
    trainer.fit()
    assert ema.ema_model is not None
    load_weights(tmp_path / "run", model := tiny_model(), weights="ema_model")
    assert torch.equal(model.weight, ema.ema_model.module.get_parameter("weight"))
    assert not torch.equal(model.weight, trainer.model.get_parameter("weight"))
    stored = trainer.evaluate(tiny_loader(), which="last", weights="ema_model")
    assert trainer.evaluate(tiny_loader(), weights="ema_model") == stored

    def make(directory: Any) -> Any:
        adapted = [callbacks.EarlyStoppingCallback(9), callbacks.SaveBestModelCallback("best.pt"), ModelEmaCallback(0.5)]
        more: dict[str, Any] = {"callbacks": [Evaluate(tiny_loader(2)), *adapted], "compute_loss": MEAN_SQUARE}
        return tiny_trainer(epochs=3, seed=1, directory=directory, **more)

    monkeypatch.chdir(tmp_path)
    prove_resume(make, at=[2, 5, 7, 14], in_process=True)


def test_a_callback_without_events_costs_a_native_run_nothing() -> None:
    class Idle(TrainerCallback):
        def verify(self, trainer: Any) -> None:
            """An event of its own."""

    assert Idle().listeners() == []
