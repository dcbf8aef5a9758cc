"""A18 and the other built-in callbacks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TrainerCallback,
    WSDCheckpointCallback,
    get_default_callbacks,
)
from cadenza.compat.accelerated.finetuning import ModelFreezer
from cadenza.compat.accelerated.trainer import DEFAULT_CALLBACKS, Trainer
from cadenza.compat.accelerated.utils import LIMIT_BATCHES_ENV_VAR, LimitBatches, remove_padding
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import check_callback
from tests.compat.accelerated.parts import HERE, Noting, data, noting_trainer, train, trainer_of


def test_the_default_callbacks_are_these_in_this_order() -> None:
    names = ["MoveModulesToDevice", "TerminateOnNaN", "PrintProgress", "ProgressBar", "LogMetrics"]
    assert [kind.__name__ for kind in DEFAULT_CALLBACKS] == [f"{name}Callback" for name in names]
    assert ProgressBarCallback not in get_default_callbacks(progress_bar=False)
    model = nn.Linear(1, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.callback_handler.callback_list == [f"{name}Callback" for name in names]


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
    assert Counter(noting.log)["on_train_step_end"] == Counter(noting.log)["on_eval_step_end"] == 2
    assert LIMIT_BATCHES_ENV_VAR not in os.environ
    for off in ("None", "none", ""):
        monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, off)
        assert trainer_of().callback_handler.callback_list == []
    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, "few")
    with pytest.raises(ValueError, match=LIMIT_BATCHES_ENV_VAR):
        trainer_of()


def test_a18_a_limit_beyond_the_loader_applies_the_last_short_window() -> None:
    trainer, noting = noting_trainer(LimitBatchesCallback(50))
    train(trainer, 1, data(5), gradient_accumulation_steps=2)
    assert Counter(noting.log)["[optimizer_step]"] == 3


def test_intermediate_evaluations_run_after_batches_three_five_and_seven(tmp_path: Path) -> None:
    class Modes(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            modes.append(trainer.model.training)

        def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
            names.append(trainer.run_history.get_metric_names())

    modes: list[bool] = []
    names: list[set[str]] = []
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    trainer, noting = noting_trainer(StepBasedEvaluationCallback(2), ema, Modes())
    train(trainer, 1, data(7), data(2))
    steps = [name for name in noting.log if name in ("on_train_step_end", "on_eval_epoch_start")]
    assert "".join("e" if "eval" in name else "." for name in steps) == "...e..e..ee"
    assert [end["is_intermediate"] for end in noting.of("on_eval_epoch_end")] == [True, True, True, False]
    assert modes == [True] * 7
    assert names[:3] == [{"intermediate_eval_loss"}] * 3
    history = trainer.run_history
    assert history.get_metric_names() == {"train_loss_epoch", "eval_loss_epoch", "ema_model_eval_loss_epoch"}
    plain = trainer_of()
    train(plain, 1, data(7), data(2))
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert history.get_metric_values("train_loss_epoch") == plain.run_history.get_metric_values("train_loss_epoch")


@pytest.mark.parametrize(("only", "steps"), [(True, 1 + 1 + 3), (False, 1 + 1 + 1)])
def test_a_limit_applies_to_intermediate_evaluations_or_to_all(only: bool, steps: int) -> None:
    noting = Noting()
    limit = LimitEvalStepsCallback(1, limit_intermediate_only=only)
    train(trainer_of(callbacks=[StepBasedEvaluationCallback(2), limit, noting]), 1, data(5), data(3))
    assert Counter(noting.log)["on_eval_step_end"] == steps


def test_modules_of_the_trainer_are_moved_to_the_device_but_the_driver_moves_the_model() -> None:
    class Moved(nn.Module):
        def to(self, *arguments: Any, **keywords: Any) -> Any:
            moved.append(arguments)
            return self

    moved: list[Any] = []
    trainer = trainer_of(callbacks=[MoveModulesToDeviceCallback])
    trainer.loss_func = nn.MSELoss()
    trainer.teacher = Moved()  # type: ignore[attr-defined]  # one of the user's
    train(trainer, 1, data(1))
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert moved == [(trainer.device,)] * 2


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


def test_a_freezer_freezes_groups_and_returns_the_unfrozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()), nn.Linear(2, 1))
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, True, False]
    assert [layer.is_frozen for layer in freezer.get_layers()] == [True, True, False, True, False]
    assert [layer.layer_group_idx for layer in freezer.get_layers()] == [(0, -3), (1, -2), (1, -2), (1, -2), (2, -1)]
    assert len(list(freezer.get_trainable_parameters())) == 4
    unfrozen = freezer.unfreeze(to_index=1)
    assert {index: len(group["params"]) for index, group in unfrozen.items()} == {1: 2}
    assert not model[0].weight.requires_grad
    assert ModelFreezer(model, freeze_batch_norms=True).get_layers()[0].is_frozen is False
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got 3"):
        ModelFreezer(3)  # type: ignore[arg-type]  # the error at hand
    with pytest.raises(IndexError, match="3 groups"):
        freezer.freeze(to_index=3)


def test_rows_of_padding_are_removed() -> None:
    assert remove_padding(torch.tensor([1, -1, 2, -1]), -1).tolist() == [1, 2]
    assert remove_padding(torch.tensor([[[-1, -1]], [[-1, 2]]]), -1).tolist() == [[[-1, 2]]]
    assert remove_padding(torch.zeros(0, 4), -1).shape == (0, 4)


def test_a_row_that_stands_for_no_predictions_is_removed_by_gather() -> None:
    trainer = trainer_of()
    nothing, rows = torch.full((1, 3), -1.0), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    assert trainer.gather(nothing, padding_value=-1).shape == (0, 3)
    assert trainer.gather(rows, padding_value=-1).tolist() == [[1.0, -1.0]]
    assert trainer.gather(rows) is rows
    with pytest.raises(TypeError, match="with a padding_value needs a tensor; got a list"):
        trainer.gather([rows], padding_value=-1)


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
