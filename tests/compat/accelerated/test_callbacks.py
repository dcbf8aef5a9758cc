"""A18 and the other built-in callbacks, subclasses of them, and the helpers that scripts use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.callbacks import (
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
    WSDCheckpointCallback,
    get_default_callbacks,
)
from cadenza.compat.accelerated.finetuning import BN_MODULES, ModelFreezer
from cadenza.compat.accelerated.trainer import DEFAULT_CALLBACKS, Trainer
from cadenza.compat.accelerated.utils import (
    LIMIT_BATCHES_ENV_VAR,
    DataLoaderSlice,
    LimitBatches,
    ModelEma,
    remove_padding,
    worker_init_fn,
)
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import check_callback
from tests.compat.accelerated.parts import (
    HERE,
    Hooks,
    Noting,
    Scripted,
    ScriptedTrainer,
    data,
    metrics_of,
    noting_trainer,
    train,
    trainer_of,
    weights_of,
)


def test_the_default_callbacks_are_these_in_this_order() -> None:
    kinds = ["MoveModulesToDevice", "TerminateOnNaN", "PrintProgress", "ProgressBar", "LogMetrics"]
    assert [kind.__name__ for kind in DEFAULT_CALLBACKS] == [f"{kind}Callback" for kind in kinds]
    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert [*get_default_callbacks(progress_bar=False)] == [
        kind for kind in DEFAULT_CALLBACKS if kind is not ProgressBarCallback
    ]
    linear = nn.Linear(1, 1)
    trainer = Trainer(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1))
    assert trainer.callback_handler.callback_list == [f"{kind}Callback" for kind in kinds]


def test_the_default_callbacks_print_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
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
        trainer_of(callbacks=[PrintProgressCallback])
    assert trainer.callback_handler.callback_list == ["LimitBatchesCallback", "Noting"]
    train(trainer, 1, data(5), data(5))
    assert noting.log.count("on_train_step_end") == noting.log.count("on_eval_step_end") == 2
    assert LIMIT_BATCHES_ENV_VAR not in os.environ
    for off in ("None", "none", ""):
        monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, off)
        assert trainer_of().callback_handler.callback_list == []
    beyond, noting = noting_trainer(LimitBatchesCallback(50))
    train(beyond, 1, data(5), gradient_accumulation_steps=2)
    assert noting.log.count("[optimizer_step]") == 3  # a limit beyond the loader applies the last short window
    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, "few")
    with pytest.raises(ValueError, match=LIMIT_BATCHES_ENV_VAR):
        trainer_of()


def test_intermediate_evaluations_run_after_batches_three_five_and_seven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes: list[bool] = []
    metrics: list[set[str]] = []
    look = Hooks(
        on_train_step_start=lambda trainer, **_: modes.append(trainer.model.training),
        on_eval_epoch_end=lambda trainer, **_: metrics.append(trainer.run_history.get_metric_names()),
    )
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    trainer, noting = noting_trainer(StepBasedEvaluationCallback(2), ema, look)
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
    train(trainer_of(callbacks=[LimitEvalStepsCallback(1), StepBasedEvaluationCallback(2)]), 1, data(5), data(2))
    limited = "Limiting evaluation to 1 steps per process"
    told = [["", f"Running evaluation after {step} training steps", limited, "", "Resuming training..."] for step in (2, 4)]
    assert capsys.readouterr().out.splitlines() == [*told[0], *told[1]]


@pytest.mark.parametrize(("only", "steps"), [(True, 1 + 1 + 3), (False, 1 + 1 + 1)])
def test_a_limit_applies_to_intermediate_evaluations_or_to_all(only: bool, steps: int) -> None:
    noting = Noting()
    limit = LimitEvalStepsCallback(1, limit_intermediate_only=only)
    train(trainer_of(callbacks=[StepBasedEvaluationCallback(2), limit, noting]), 1, data(5), data(3))
    assert noting.log.count("on_eval_step_end") == steps


def test_modules_of_the_trainer_are_moved_to_the_device_but_the_driver_moves_the_model() -> None:
    class Moved(nn.Module):
        def to(self, *arguments: Any, **keywords: Any) -> Any:
            moved.append((self, *arguments))
            return self

    class Some(MoveModulesToDeviceCallback):
        def _get_modules(self, trainer: Any) -> list[tuple[str, nn.Module]]:
            return [(name, one) for name, one in super()._get_modules(trainer) if name == "teacher"]

    for kind, names in ((MoveModulesToDeviceCallback, ["teacher", "student"]), (Some, ["teacher"])):
        moved: list[Any] = []
        trainer: Any = trainer_of(callbacks=[kind])
        trainer.loss_func, trainer.teacher, trainer.student = nn.MSELoss(), Moved(), Moved()
        train(trainer, 1, data(1))
        trainer.evaluate(data(1), dataloader_kwargs=HERE)
        assert moved == [(getattr(trainer, name), trainer.device) for name in names] * 2


ARGUMENTS: dict[type[BaseCallback], tuple[Any, ...]] = {
    LimitBatchesCallback: (3,),
    LimitEvalStepsCallback: (2,),
    StepBasedEvaluationCallback: (2,),
}


FACTORIES = [
    kind
    for kind in (getattr(callbacks, name) for name in callbacks.__all__ if name.endswith("Callback"))
    if kind not in (TrainerCallback, WSDCheckpointCallback)  # the second one needs a WSD schedule
]


@pytest.mark.parametrize("kind", FACTORIES, ids=lambda kind: kind.__name__)
def test_each_built_in_callback_keeps_the_contract_of_callbacks_in_native_trainers(
    kind: Callable[..., BaseCallback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_callback(lambda: kind(*ARGUMENTS.get(kind, ())), reads=True)  # type: ignore[call-overload]  # by class


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepBasedEvaluationCallback(0),
        lambda: LimitEvalStepsCallback(0),
        lambda: LimitBatchesCallback(0),
        lambda: LimitBatches(0),
        lambda: callbacks.SaveTrainingStateCallback(save_every_n_epochs=0),
        lambda: callbacks.EarlyStoppingCallback(early_stopping_threshold=-1),
    ],
)
def test_a_wrong_number_is_an_error_in_the_constructor(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        make()


def test_a_callback_need_not_call_the_constructor_of_its_base_class() -> None:
    class Own(SaveBestModelCallback):
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
    class Mine(SaveBestModelCallback):
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
        stop = EarlyStoppingCallback(greater_is_better=greater)
        assert stop.operator(3.0, 2.0) is greater
        for value in (None, 2.0, None):
            stop.best_metric = value
            assert stop.best_metric == value


def test_metrics_pass_through_the_methods_that_collect_them() -> None:
    class Rounded(LogMetricsCallback):
        def _get_latest_metrics(self, trainer: Any, metric_names: Any) -> dict[str, Any]:
            return {name: round(value) for name, value in super()._get_latest_metrics(trainer, metric_names).items()}

        def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
            logged.append(metrics)

    logged: list[dict[str, Any]] = []
    train(trainer_of(ScriptedTrainer, [Rounded]), 1, Scripted(1.2), Scripted(2.8), batch_size=1)
    assert logged == [{"train_loss_epoch": 1}, {"eval_loss_epoch": 3}]


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


def test_training_states_know_how_many_batches_there_were(tmp_path: Path) -> None:
    saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, max_checkpoints=2)
    trainer = trainer_of(callbacks=[saving])
    train(trainer, 1, data(5))
    assert saving._global_step == 5
    assert saving._saved_checkpoints == [tmp_path / "step_4", tmp_path / "final"]
    assert trainer.load_training_state(tmp_path / "step_4")["global_step"] == 4
    saving.on_train_step_end(trainer, step=5)  # the arguments of the original
    assert saving._global_step == 6


def test_an_average_with_its_own_formula_gets_each_tensor(tmp_path: Path) -> None:
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


def test_an_average_may_change_its_decay() -> None:
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


# -- helpers ------------------------------------------------------------------------------------------------------


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


def test_rows_of_padding_are_removed_also_by_gather() -> None:
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


def test_slices_of_loaders_and_seeds_of_workers() -> None:
    batches = DataLoaderSlice(range(5), 3)
    assert [*batches] == [*batches] == [0, 1, 2]
    assert (len(batches), len(DataLoaderSlice(range(2), 3))) == (3, 2)
    before = torch.get_rng_state()
    assert worker_init_fn(3) == torch.initial_seed() + 3
    assert torch.equal(torch.get_rng_state(), before)
