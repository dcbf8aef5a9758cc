"""The adapter's trainer: seeds, precision, results of hooks, replaced parts."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.compat.accelerated.callbacks import StopTrainingError, TrainerCallback
from cadenza.compat.accelerated.checks import check_enough, report_uneven
from cadenza.compat.accelerated.data import kwargs_for
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.tracking import InMemoryRunHistory
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import tiny_loader
from tests.compat.accelerated.parts import HERE, Noting, data, noting_trainer, train, trainer_of


class Order(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen += batch[0].flatten().tolist()


def order(seed: int, epochs: int = 2) -> list[float]:
    noted = Order()
    trainer = trainer_of(callbacks=[noted])
    torch.manual_seed(seed)
    trainer.train(data(8), epochs, per_device_batch_size=2, train_dataloader_kwargs=HERE)
    return noted.seen


def test_the_order_of_the_data_depends_on_the_seed_of_the_user() -> None:
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:16] != order(1)[16:]


def test_training_does_not_change_the_seed_of_the_user() -> None:
    torch.manual_seed(7)
    train(trainer_of(), 1, data(2))
    one = torch.rand(())
    torch.manual_seed(8)
    train(trainer_of(), 1, data(2))
    assert one != torch.rand(())


def test_the_launcher_sets_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    class Look(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            kinds.add(batch_output["model_outputs"].dtype)

        def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            kinds.add(batch_output["model_outputs"].dtype)

    kinds: set[torch.dtype] = set()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trainer_of(callbacks=[Look])
    train(trainer, 1, data(1), data(1))
    assert kinds == {torch.bfloat16}
    assert trainer.run_config is not None
    assert trainer.run_config.mixed_precision == "bf16"


def test_a_scheduler_is_not_stepped_if_the_scaler_skips_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weights(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            weights.append(next(trainer.model.parameters()).item())

    weights: list[float] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    trainer, noting = noting_trainer(Weights())
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    train(trainer, 1, data(8), create_scheduler_fn=schedule)
    weights.append(next(trainer.model.parameters()).item())
    changed = sum(one != other for one, other in pairwise(weights))
    assert 0 < changed < noting.log.count("[optimizer_step]") == 8  # the first scale is too large for float16
    assert noting.log.count("[scheduler_step]") == changed


def test_an_own_optimizer_step_updates_as_the_scaler_of_fp16_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflows(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (float("inf") if self.run_history.current_epoch == 2 else 1)}

    class OwnStep(Overflows):
        def optimizer_step(self) -> None:
            self.optimizer.step()

    class EverySecond(Overflows):
        updates = 0

        def optimizer_step(self) -> None:
            self.updates += 1
            if self.updates % 2:
                self.optimizer.step()

    def trained(kind: type[Trainer]) -> float:
        trainer = trainer_of(kind)
        train(trainer, 3, data(8), create_scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9))
        return float(next(trainer.model.parameters()).detach().flatten()[0])

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    weight = trained(Overflows)
    assert trained(OwnStep) == weight
    every_second = trained(EverySecond)
    assert math.isfinite(every_second)
    assert every_second != weight


@pytest.mark.parametrize(
    ("result", "error"), [({"loss": torch.ones(())}, KeyError), (None, TypeError), (torch.ones(()), TypeError)]
)
def test_a_wrong_result_of_a_hook_is_an_error_that_names_the_missing_entries(result: Any, error: type[Exception]) -> None:
    class Short(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            return result

    with pytest.raises(error, match=r"calculate_train_batch_loss must return a dict with 'loss' and 'batch_size'"):
        train(trainer_of(Short), 1, data(1))


def test_more_entries_of_a_batch_reach_the_callbacks() -> None:
    class More(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {**super().calculate_train_batch_loss(batch), "extra": 42}

    noting = Noting()
    train(trainer_of(More, [noting]), 1, data(1))
    assert noting.of("on_train_step_end")[0]["batch_output"]["extra"] == 42


def test_handler_and_run_history_can_be_replaced() -> None:
    class Loud(CallbackHandler):
        def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
            called.append(event)
            super().call_event(event, *args, **kwargs)

    class Own(Trainer):
        def _create_callback_handler(self) -> CallbackHandler:
            return Loud(self._callbacks)

    called: list[str] = []
    history, model = InMemoryRunHistory(), nn.Linear(1, 1)
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), run_history=history)
    train(trainer, 1, data(1))
    step = ["on_train_step_start", "on_train_step_end"]
    epoch = ["on_train_epoch_start", *step, "on_train_epoch_end", "on_training_run_epoch_end"]
    assert called == ["on_init_end", "on_training_run_start", *epoch, "on_training_run_end"]
    assert history.get_metric_names() == {"train_loss_epoch"}


def test_native_evaluations_and_monitors_work_in_the_adapter_s_trainer() -> None:
    noting = Noting()
    native = [Evaluate(tiny_loader(2), name="other"), EarlyStopping("eval/loss", mode="min", threshold=100.0)]
    trainer = trainer_of(callbacks=[*native, noting])
    train(trainer, 5, data(3), data(2))
    assert trainer.native_run is not None
    assert trainer.native_run.outcome is not None
    assert trainer.native_run.outcome.kind == "stopped"
    assert len(trainer.run_history.get_metric_values("other_loss_epoch")) == 1
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]


def test_a_trainer_can_be_used_again_after_an_error_and_after_a_stop() -> None:
    class Once(TrainerCallback):
        def __init__(self, error: Exception) -> None:
            self.error: Exception | None = error

        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            error, self.error = self.error, None
            if error is not None:
                raise error

    noting = Noting()
    trainer = trainer_of(callbacks=[Once(RuntimeError("once")), noting])
    with pytest.raises(RuntimeError, match="once"):
        train(trainer, 1, data(1))
    train(trainer, 1, data(1))
    assert noting.log[-1] == "on_training_run_end"
    stopped = trainer_of(callbacks=[Once(StopTrainingError("once"))])
    train(stopped, 2, data(1))
    train(stopped, 2, data(1))
    assert stopped.run_history.current_epoch == 3


def test_a_sampler_replaces_shuffle_and_a_batch_sampler_replaces_the_batch_size() -> None:
    defaults = {"shuffle": True, "batch_size": 8}
    assert kwargs_for(defaults, {"sampler": "mine"}) == {"batch_size": 8, "sampler": "mine"}
    assert kwargs_for(defaults, {"batch_sampler": "mine"}) == {"batch_sampler": "mine"}
    assert kwargs_for(defaults, None) == defaults


def test_uneven_evaluation_batches_are_reported_before_the_run() -> None:
    said: list[str] = []
    report_uneven(8, 4, 2, said.append)
    report_uneven(None, 4, 2, said.append)
    assert said == []
    report_uneven(9, 4, 2, said.append)
    report_uneven(7, 4, 2, said.append)
    assert "so some processes get none" in said[0]
    assert "differ in size" in said[1]
    with pytest.raises(ValueError, match="takes 4 samples at a time over all processes, but the data set has 3"):
        check_enough(3, 4)


def test_the_plan_of_the_native_run_lists_hooks_and_callbacks() -> None:
    class Plan(TrainerCallback):
        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            assert trainer.native_run is not None
            listed.extend(hooks_of(trainer.native_run).callbacks)

    listed: list[str] = []
    train(trainer_of(callbacks=[Plan]), 1, data(1))
    assert listed == ["Trainer's hooks", "Plan", "Trainer's evaluation"]
