"""The methods that pytorch-accelerated documents for overriding, besides the hooks; and errors in arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import LogMetricsCallback, StopTrainingError, TrainerCallback
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.tracking import InMemoryRunHistory
from cadenza.compat.accelerated.trainer import Trainer, TrainerWithTimmScheduler
from cadenza.drivers.single import SingleDriver
from cadenza.testing import tiny_run
from tests.compat.accelerated.parts import HERE, Noting, NotingTrainer, data, noting_trainer, train, trainer_of


class Around(NotingTrainer):
    """Records where each part begins and ends."""

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        self.log.append("prepare")
        super()._prepare_model_optimizer_and_dataloaders()

    def _create_run_config(self, *arguments: Any, **keywords: Any) -> TrainerRunConfig:
        self.log.append("config")
        return super()._create_run_config(*arguments, **keywords)

    def _run_training(self) -> None:
        self.log.append("training")
        super()._run_training()
        self.log.append("trained")

    def _run_eval_epoch(self, *arguments: Any, **keywords: Any) -> None:
        self.log.append("eval epoch")
        super()._run_eval_epoch(*arguments, **keywords)
        self.log.append("evaluated")

    def _run_evaluation(self) -> None:
        self.log.append("evaluation")
        super()._run_evaluation()
        self.log.append("over")


def around() -> Around:
    noting = Noting()
    NotingTrainer.log = noting.log
    linear = nn.Linear(1, 1)
    trainer = Around(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1), callbacks=[noting])
    noting.log.clear()
    return trainer


def test_the_parts_of_a_training_are_called_in_this_order() -> None:
    trainer = around()
    train(trainer, 1, data(1), data(1), create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    log = trainer.log
    begin = ["[create_train_dataloader]", "[create_eval_dataloader]", "prepare", "config", "[create_scheduler]", "training"]
    assert log[:7] == [*begin, "[training_run_start]"]
    index = log.index("eval epoch")
    assert log[index - 1 : index + 3] == ["on_train_epoch_end", "eval epoch", "[eval_epoch_start]", "on_eval_epoch_start"]
    index = log.index("evaluated")
    assert log[index - 1 : index + 2] == ["on_eval_epoch_end", "evaluated", "[training_run_epoch_end]"]
    assert log[-2:] == ["on_training_run_end", "trained"]


def test_the_parts_of_an_evaluation_are_called_in_this_order() -> None:
    trainer = around()
    trainer.evaluate(data(1), per_device_batch_size=2, dataloader_kwargs=HERE)
    step = ["on_eval_step_start", "[calculate_eval_batch_loss]", "on_eval_step_end"]
    assert trainer.log == [
        *["[create_eval_dataloader]", "prepare", "config", "evaluation", "[evaluation_run_start]", "on_evaluation_run_start"],
        *["eval epoch", "[eval_epoch_start]", "on_eval_epoch_start", *step, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["evaluated", "[evaluation_run_end]", "on_evaluation_run_end", "over"],
    ]
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}


def test_parts_replaced_while_preparing_are_trained() -> None:
    class Other(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            super()._prepare_model_optimizer_and_dataloaders()
            self.model = other
            self.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            self._train_dataloader = [data(1)[:]]

    other = nn.Linear(1, 1)
    before, noting = other.weight.item(), Noting()
    trainer = trainer_of(Other, [noting])
    train(trainer, 1, data(5))
    assert other.weight.item() != before
    assert len(noting.of("on_train_step_end")) == 1
    assert trainer.model is other


def test_the_training_uses_the_returned_run_config() -> None:
    class Mine(Trainer):
        def _create_run_config(self, *arguments: Any, **keywords: Any) -> TrainerRunConfig:
            asked = super()._create_run_config(*arguments, **keywords)
            return replace(asked, num_epochs=2, gradient_accumulation_steps=3, max_num_train_steps=3)

    trainer = trainer_of(Mine)
    train(trainer, 9, data(6))
    assert trainer.native_run is not None
    assert (trainer.native_run.progress.step, trainer.native_run.progress.batch) == (3, 9)


def test_a_custom_driver_comes_with_the_accelerator() -> None:
    class Mine(Trainer):
        def _create_accelerator(self) -> Accelerator:
            return Accelerator(driver)

    driver = SingleDriver("cpu")
    trainer = trainer_of(Mine)
    train(trainer, 1, data(1))
    assert trainer.native_run is not None
    assert trainer.native_run.driver is driver


def test_clipping_can_be_replaced() -> None:
    class Zero(Trainer):
        def _clip_gradients(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad = None

    trainer = trainer_of(Zero)
    train(trainer, 1, data(2), gradient_clip_value=1.0)
    assert [one.item() for one in trainer.model.parameters()] == [0.5, 0.0]


def test_a_stop_in_an_overridden_evaluation_epoch_is_a_stop() -> None:
    class Stops(Trainer):
        def _run_eval_epoch(self, *arguments: Any, **keywords: Any) -> None:
            raise StopTrainingError("enough")

    noting = Noting()
    trainer = trainer_of(Stops, [noting])
    train(trainer, 2, data(1), data(1))
    assert noting.log[-3:] == ["on_train_epoch_end", "on_stop_training_error", "on_training_run_end"]
    noting.log.clear()
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert noting.log == ["on_evaluation_run_start", "on_stop_training_error", "on_evaluation_run_end"]


def test_an_error_in_an_evaluation_run_ends_it_at_once() -> None:
    class Broken(TrainerCallback):
        def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

    trainer, noting = noting_trainer(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert noting.log[-1] == "on_eval_step_end"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_epochs": None}, ValueError, "num_epochs must be a whole number of at least 1; got None"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be a whole number of at least 1; got 0"),
        ({"num_epochs": True}, ValueError, "num_epochs must be a whole number of at least 1; got True"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps must be a whole number of at least 1"),
        ({"max_num_train_steps": 0}, ValueError, "max_num_train_steps must be None or a whole number of at least 1"),
        ({"gradient_clip_value": -1.0}, ValueError, "gradient_clip_value must be a number greater than 0"),
        ({"gradient_clip_value": "1"}, ValueError, "gradient_clip_value must be a number greater than 0, or None; got '1'"),
        ({"create_scheduler_fn": 3}, TypeError, "create_scheduler_fn must be a function"),
        ({"create_scheduler_fn": lambda optimizer: None}, TypeError, "create_scheduler_fn must return a scheduler"),
        ({"train_dataset": DataLoader(data(1))}, TypeError, "expected a data set; got a DataLoader"),
        ({"create_scheduler_fn": lambda optimizer: 3}, TypeError, "Trainer calls step of the scheduler .*; got a int"),
        ({"train_dataset": None}, TypeError, "expected a data set, with __getitem__ .*; got None"),
        ({"train_dataloader_kwargs": "x"}, TypeError, "arguments of a loader must be a mapping .*; got 'x'"),
        ({"train_dataset": [{"x": 1.0}]}, TypeError, r"batch must be \(inputs, targets\); got a mapping with \['x'\]"),
    ],
)
def test_a_wrong_argument_of_a_training_is_an_error_that_names_it(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer_of().train(**{"train_dataset": data(1), "num_epochs": 1, "train_dataloader_kwargs": HERE, **arguments})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"model": "linear"}, "model must be an nn.Module"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "Call it first"),
        ({"optimizer": None}, "Without one, only evaluate works"),
        ({"callbacks": LogMetricsCallback}, r"Write callbacks=\(...,\)"),
        ({"run_history": {}}, r"instance of a subclass of RunHistory; got \{\}, which lacks _increment_epoch, _set_epoch, "),
        ({"run_history": InMemoryRunHistory}, r"got <class '.*InMemoryRunHistory'>\. Call it first"),
    ],
)
def test_a_wrong_part_of_a_trainer_is_an_error_before_anything_runs(part: Any, message: str) -> None:
    linear = nn.Linear(1, 1)
    parts: dict[str, Any] = {"model": linear, "optimizer": torch.optim.SGD(linear.parameters(), lr=0.1), "callbacks": ()}
    with pytest.raises(TypeError, match=message):
        train(Trainer(loss_func=nn.MSELoss(), **{**parts, **part}), 1, data(1))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("create_eval_dataloader", "must return a loader; got None"),
        ("_create_run_config", "must return a TrainerRunConfig; got None"),
        ("_create_callback_handler", "must return a CallbackHandler; got None"),
    ],
)
def test_an_override_without_a_return_statement_is_an_error(method: str, message: str) -> None:
    kind = type("Forgetful", (Trainer,), {method: lambda *arguments, **keywords: None})
    with pytest.raises(TypeError, match=message):
        train(trainer_of(kind), 1, data(1), data(1))


def test_a_scheduler_needs_the_method_that_its_trainer_calls() -> None:
    class Own(Trainer):
        def scheduler_step(self) -> None:
            self.scheduler.advance()

    class Scheduler:
        steps = 0

        def advance(self) -> None:
            self.steps += 1

    with pytest.raises(TypeError, match="TrainerWithTimmScheduler calls step_update of the scheduler"):
        train(trainer_of(TrainerWithTimmScheduler), 1, data(1), create_scheduler_fn=partial(ExponentialLR, gamma=0.9))
    trainer = trainer_of(Own)
    train(trainer, 1, data(3), create_scheduler_fn=lambda optimizer: Scheduler())
    assert trainer.scheduler.steps == 3


def test_lengths_may_be_numpy_integers() -> None:
    trainer = trainer_of()
    two = np.int64(2)
    train(trainer, two, data(4), gradient_accumulation_steps=two, max_num_train_steps=np.int64(9))  # type: ignore[arg-type]  # NumPy's
    config = trainer.run_config
    assert config is not None
    assert [type(one) for one in (config.num_epochs, config.gradient_accumulation_steps, config.max_num_train_steps)] == [
        int
    ] * 3


def test_an_unknown_setting_is_an_error_with_the_nearest_name() -> None:
    trainer = trainer_of()
    train(trainer, 1, data(1))
    assert trainer.run_config is not None
    with pytest.raises(KeyError, match="Did you mean 'num_epochs'"):
        trainer.run_config["num_epoch"]


class Mistyped(TrainerCallback):
    def on_train_epoch_ends(self, trainer: Any, **kwargs: Any) -> None:
        """Never called."""

    def on_verify(self, trainer: Any) -> None:
        """A custom event with a name unlike the others."""


def trained(callback: TrainerCallback) -> Any:
    trainer = trainer_of(callbacks=[callback])
    train(trainer, 1, data(1))
    return trainer.native_run


@pytest.mark.parametrize("run_with", [trained, lambda callback: tiny_run(callbacks=[callback])])
def test_a_method_named_almost_like_an_event_is_a_warning(
    run_with: Callable[[TrainerCallback], Any], caplog: pytest.LogCaptureFixture
) -> None:
    run_with(Mistyped())
    messages = [record.getMessage() for record in caplog.records if "is not an event" in record.getMessage()]
    assert len(messages) == 1
    assert "Mistyped.on_train_epoch_ends" in messages[0]
    assert "Did you mean 'on_train_epoch_end'" in messages[0]
