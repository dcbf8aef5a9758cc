"""Attributes and methods of built-in callbacks, histories and helpers that subclasses and scripts use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.accelerated.callbacks import (
    EarlyStoppingCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    get_default_callbacks,
)
from cadenza.compat.accelerated.finetuning import BN_MODULES, ModelFreezer
from cadenza.compat.accelerated.tracking import InMemoryRunHistory
from cadenza.compat.accelerated.trainer import (
    DEFAULT_CALLBACKS,
    TrainerPlaceholderValues,
    replace_trainer_placeholder_values,
)
from cadenza.compat.accelerated.utils import DataLoaderSlice, ModelEma, worker_init_fn
from tests.compat.accelerated.parts import Scripted, ScriptedTrainer, data, train, trainer_of


def test_an_intermediate_evaluation_is_announced_with_its_step_and_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    train(trainer_of(callbacks=[LimitEvalStepsCallback(1), StepBasedEvaluationCallback(2)]), 1, data(5), data(2))
    assert capsys.readouterr().out.splitlines() == [
        line
        for step in (2, 4)
        for line in (
            *["", f"Running evaluation after {step} training steps", "Limiting evaluation to 1 steps per process"],
            *["", "Resuming training..."],
        )
    ]


def test_a_subclass_may_choose_the_best_model_itself(tmp_path: Path) -> None:
    class Mine(SaveBestModelCallback):
        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            value = trainer.run_history.get_latest_metric(self.watch_metric)
            if self.best_metric is None or self.operator(value, self.best_metric):
                self.best_metric, self.best_metric_epoch = value, trainer.run_history.current_epoch
                trainer.save_checkpoint(self.save_path)

    best = Mine(tmp_path / "best.pt", watch_metric="train_loss_epoch", greater_is_better=True)
    trainer = trainer_of(ScriptedTrainer, [best])
    for losses, expected in (((1.0,), 1.0), ((2.0,), 2.0)):  # the second training starts without a best value
        train(trainer, 1, Scripted(*losses), batch_size=1)
        assert (best.best_metric, best.best_metric_epoch) == (expected, 1)


@pytest.mark.parametrize("greater", [False, True])
def test_early_stopping_has_an_operator_and_a_best_value_that_may_be_set(greater: bool) -> None:
    stop = EarlyStoppingCallback(greater_is_better=greater)
    assert stop.best_metric is None
    stop.best_metric = 2.0
    assert stop.best_metric == 2.0
    assert stop.operator(3.0, 2.0) is greater
    stop.best_metric = None
    assert stop.best_metric is None


def test_a_subclass_may_trigger_the_end_of_the_process() -> None:
    class Large(TerminateOnNaNCallback):
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


def test_metrics_pass_through_the_methods_that_collect_them() -> None:
    class Rounded(LogMetricsCallback):
        def _get_latest_metrics(self, trainer: Any, metric_names: Any) -> dict[str, Any]:
            return {name: round(value) for name, value in super()._get_latest_metrics(trainer, metric_names).items()}

        def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
            logged.append(metrics)

    logged: list[dict[str, Any]] = []
    train(trainer_of(ScriptedTrainer, [Rounded]), 1, Scripted(1.2), Scripted(2.8), batch_size=1)
    assert logged == [{"train_loss_epoch": 1}, {"eval_loss_epoch": 3}]


def test_a_subclass_may_choose_the_modules_to_move() -> None:
    class Moved(nn.Module):
        def to(self, *arguments: Any, **keywords: Any) -> Moved:
            moved.append(self)
            return self

    class Some(MoveModulesToDeviceCallback):
        def _get_modules(self, trainer: Any) -> list[tuple[str, nn.Module]]:
            return [(name, one) for name, one in super()._get_modules(trainer) if name == "teacher"]

    moved: list[nn.Module] = []
    trainer: Any = trainer_of(callbacks=[Some])
    trainer.teacher, trainer.student = Moved(), Moved()
    train(trainer, 1, data(1))
    assert moved == [trainer.teacher]


def test_an_average_with_its_own_formula_gets_each_tensor(tmp_path: Path) -> None:
    class Newest(ModelEma):
        def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
            return updated_model_weights * 2

    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", model_ema=Newest)
    assert ema.callback_handler.callbacks == []
    trainer = trainer_of(callbacks=[ema])
    train(trainer, 2, data(2))
    assert ema.ema_model is not None
    averaged = [one.item() for one in ema.ema_model.module.parameters()]
    assert averaged == [2 * one.item() for one in trainer.model.parameters()]
    ema.ema_model.set(trainer.model)
    assert [one.item() for one in ema.ema_model.module.parameters()] == [one.item() for one in trainer.model.parameters()]
    assert ModelEma(nn.Linear(1, 1), decay=0.75).update_fn(torch.tensor(4.0), torch.tensor(8.0)).item() == 5.0


def test_an_average_may_change_its_decay(tmp_path: Path) -> None:
    class Ramp(ModelEma):
        def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
            super().__init__(model, decay)
            self.decay = 0.0

        def update(self, model: nn.Module) -> None:
            super().update(model)
            self.decay = 0.75

    model = nn.Linear(1, 1, bias=False)
    average = Ramp(model)
    seen = []
    for weight in (4.0, 8.0):
        with torch.no_grad():
            model.weight.fill_(weight)
        average.update(model)
        seen.append(next(average.module.parameters()).item())
    assert seen == [4.0, 0.75 * 4 + 0.25 * 8]
    wrong: Any = nn.Linear
    with pytest.raises(TypeError, match=r"model_ema must be ModelEma or a subclass; got <class '.*Linear'>"):
        ModelEmaCallback(save_path=tmp_path / "ema.pt", model_ema=wrong)


def test_training_states_know_how_many_batches_there_were(tmp_path: Path) -> None:
    saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, max_checkpoints=2)
    trainer = trainer_of(callbacks=[saving])
    train(trainer, 1, data(5))
    assert saving._global_step == 5
    assert saving._saved_checkpoints == [tmp_path / "step_4", tmp_path / "final"]
    assert trainer.load_training_state(tmp_path / "step_4")["global_step"] == 4
    saving.on_train_step_end(trainer, step=5)  # the arguments of the original
    assert saving._global_step == 6


def test_the_values_of_a_metric_are_the_list_that_grows() -> None:
    history = InMemoryRunHistory()
    history.update_metric("loss", 1.0)
    values = history.get_metric_values("loss")
    history.update_metric("loss", 2.0)
    assert values == [1.0, 2.0]
    history._metrics["accuracy"].append(0.5)
    assert history.get_latest_metric("accuracy") == 0.5
    assert history._metrics["nothing"] == []
    assert history.get_metric_names() == {"loss", "accuracy"}


def test_trainable_parameters_are_a_list_and_freezing_with_evaluation_mode_freezes() -> None:
    freezer = ModelFreezer(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1)))
    freezer.freeze(set_modules_as_eval=True)
    trainable = freezer.get_trainable_parameters()
    assert len(trainable) == len(trainable) == 4  # BatchNorm stays trainable
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, False, False]
    assert nn.BatchNorm1d in BN_MODULES


def test_default_callbacks_slices_and_seeds_are_there() -> None:
    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert len(get_default_callbacks(progress_bar=False)) == len(DEFAULT_CALLBACKS) - 1
    batches = DataLoaderSlice(range(5), 3)
    assert [*batches] == [*batches] == [0, 1, 2]
    assert (len(batches), len(DataLoaderSlice(range(2), 3))) == (3, 2)
    before = torch.get_rng_state()
    assert worker_init_fn(3) == torch.initial_seed() + 3
    assert torch.equal(torch.get_rng_state(), before)


def test_placeholders_are_replaced_for_any_object_with_the_settings_of_a_run() -> None:
    config = SimpleNamespace(num_epochs=5, num_update_steps_per_epoch=10, num_local_update_steps_per_epoch=10, num_processes=1)
    trainer = SimpleNamespace(run_config=config, _train_dataloader=range(20), _eval_dataloader=range(7))
    values = TrainerPlaceholderValues
    made = replace_trainer_placeholder_values(
        trainer, partial(dict, epochs=values.NUM_EPOCHS * 2, train=values.TRAIN_DATALOADER_LEN, eval=values.EVAL_DATALOADER_LEN)
    )()
    assert made == {"epochs": 10, "train": 20, "eval": 7}
    assert replace_trainer_placeholder_values(trainer, dict) is dict
    assert "NUM_EPOCHS" in values.placeholder_set()
