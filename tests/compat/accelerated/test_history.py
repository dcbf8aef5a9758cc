"""A19, A20 and A22: evaluation runs, the run history, schedulers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from cadenza.compat.accelerated.callbacks import LogMetricsCallback, TrainerCallback
from cadenza.compat.accelerated.schedulers import CosineLrScheduler, SchedulerBase
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues, TrainerWithTimmScheduler
from tests.compat.accelerated.parts import HERE, Noting, Scripted, ScriptedTrainer, data, noting_trainer, train, trainer_of


def test_a19_an_evaluation_run_resets_the_history_and_has_its_own_events() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), data(2))
    noting.log.clear()
    trainer.evaluate(data(2), per_device_batch_size=2, dataloader_kwargs=HERE)
    step = ["on_eval_step_start", "[calculate_eval_batch_loss]", "on_eval_step_end"]
    assert noting.log == [
        *["[create_eval_dataloader]", "[evaluation_run_start]", "on_evaluation_run_start"],
        *["[eval_epoch_start]", "on_eval_epoch_start", *step * 2, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["[evaluation_run_end]", "on_evaluation_run_end"],
    ]
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}
    assert trainer.run_history.current_epoch == 1
    config = trainer.run_config
    assert config is not None
    assert (config.num_epochs, config.train_dl_kwargs, config.eval_per_device_batch_size) == (1, None, 2)


def test_a19_an_evaluation_run_needs_no_training_and_records_the_loss_over_samples() -> None:
    trainer = trainer_of(ScriptedTrainer)
    trainer.evaluate(Scripted(1.0, 2.0, 6.0), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.run_history.get_latest_metric("evaluation_loss") == 3.0
    assert trainer.run_config is not None
    assert trainer.run_config.to_dict()["num_update_steps_per_epoch"] == 0
    with pytest.raises(ValueError, match="evaluate needs a dataset"):
        trainer_of().evaluate()


def test_a20_the_run_history_keeps_values_by_name() -> None:
    history = InMemoryRunHistory()
    history.update_metric("accuracy", 0.5)
    history.update_metric("accuracy", 0.7)
    history.update_metric("loss", 1.0)
    assert history.get_metric_names() == {"accuracy", "loss"}
    assert history.get_metric_values("accuracy") == [0.5, 0.7]
    assert history.get_latest_metric("accuracy") == 0.7
    with pytest.raises(ValueError, match="Did you mean 'accuracy'"):
        history.get_latest_metric("acuracy")
    assert history.get_metric_values("acuracy") == []
    assert history.get_metric_names() == {"accuracy", "loss"}  # a look-up does not create a metric


def test_a20_a_prefix_changes_the_names_in_writes_but_not_in_reads() -> None:
    history = InMemoryRunHistory()
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 1.0)
    assert history.get_metric_names() == {"ema_loss"}
    assert history.get_latest_metric("ema_loss") == 1.0
    history._increment_epoch()
    history.reset()
    assert (history.get_metric_names(), history.current_epoch, history.metric_name_prefix) == (set(), 1, "ema_")


def test_a20_a_metric_can_be_deleted_once() -> None:
    history = InMemoryRunHistory()
    history.update_metric("loss", 1.0)
    history.delete_metric("loss")
    with pytest.raises(KeyError):
        history.delete_metric("loss")


def test_metrics_with_train_in_their_names_are_logged_after_the_steps_and_others_after_the_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Keep(LogMetricsCallback):
        def log_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
            logged.append(set(metrics))

    class Own(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.run_history.update_metric("pretrained", 1)
            trainer.run_history.update_metric("other", 2)

    logged: list[set[str]] = []
    train(trainer_of(callbacks=[Own, Keep, LogMetricsCallback]), 1, data(1), data(1))
    assert logged == [{"train_loss_epoch", "pretrained"}, {"eval_loss_epoch", "other"}]
    assert "\nother: 2\n" in capsys.readouterr().out


def test_the_loss_of_an_epoch_is_the_mean_over_samples() -> None:
    tracker = LossTracker()
    assert tracker.average == 0
    for losses in ([1.0, 2.0], [6.0]):
        tracker.update(torch.tensor(losses).mean(), len(losses))
    assert (tracker.average, tracker.total_loss, tracker.running_count, tracker.loss_value) == (3.0, 9.0, 3, 6.0)


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen.append(round(trainer.optimizer.param_groups[0]["lr"], 9))


def test_a22_a_scheduler_is_stepped_after_each_update() -> None:
    rates = Rates()
    trainer = trainer_of(callbacks=[rates], lr=1.0)
    tenth = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1)
    train(trainer, 1, data(3), create_scheduler_fn=tenth)
    assert rates.seen == [1.0, 0.1, 0.01]
    rates.seen.clear()
    train(trainer, 1, data(6), create_scheduler_fn=tenth, gradient_accumulation_steps=2)
    assert rates.seen == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])


def test_a22_a_training_without_create_scheduler_fn_has_no_scheduler_even_after_one_that_had() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 1, data(2), create_scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1))
    noting.log.clear()
    train(trainer, 1, data(2))
    assert trainer.scheduler is None
    assert "[scheduler_step]" not in noting.log


def test_placeholders_are_values_of_the_run() -> None:
    class Keep:
        def __init__(self, optimizer: Any, **values: Any) -> None:
            self.values = values

        def step(self) -> None:
            pass

    values = TrainerPlaceholderValues
    create = partial(
        Keep,
        epochs=values.NUM_EPOCHS,
        updates=values.NUM_UPDATE_STEPS_PER_EPOCH * 2 + 1,
        both=values.NUM_EPOCHS * values.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        train=values.TRAIN_DATALOADER_LEN - 1,
        evaluation=values.EVAL_DATALOADER_LEN,
    )
    trainer = trainer_of()
    train(trainer, 3, data(5), data(4), gradient_accumulation_steps=2, create_scheduler_fn=create)
    assert trainer.scheduler.values == {"epochs": 3, "updates": 7, "both": 9, "train": 4, "evaluation": 4}
    with pytest.raises(ValueError, match="EVAL_DATALOADER_LEN"):
        train(trainer, 3, data(5), create_scheduler_fn=create)


def test_the_cosine_schedule_has_warm_up_decay_and_cool_down() -> None:
    trainer = trainer_of(lr=1.0)
    create = CosineLrScheduler.create_scheduler_fn(
        num_warmup_epochs=2, num_cooldown_epochs=1, lr_min=0.1, warmup_starting_lr=0.2
    )
    rates = Rates()
    trainer.callback_handler.add_callback(rates)
    train(trainer, 10, data(10), create_scheduler_fn=create)
    assert rates.seen[:2] == [0.2, 0.2]  # the counter of the schedule starts at -1
    assert rates.seen[11] == pytest.approx(0.6)
    assert rates.seen[21] == pytest.approx(1.0)
    assert rates.seen[56] == pytest.approx(0.55)  # half of the way from 20 to 90
    assert all(one > other for one, other in zip(rates.seen[21:90], rates.seen[22:91], strict=True))
    assert rates.seen[91:] == [0.1] * 9


def test_warm_up_may_start_at_a_fraction_of_the_rate() -> None:
    optimizer = torch.optim.SGD(trainer_of().model.parameters(), lr=2.0)
    scheduler = CosineLrScheduler(optimizer, 10, 1, num_warmup_epochs=5, warmup_starting_lr_ratio=0.1, min_lr_ratio=0.05)
    rates = [scheduler.get_updated_values(update)[0] for update in range(12)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[5] == pytest.approx(2.0)
    assert rates[11] == pytest.approx(0.1)
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[0])


def test_a_schedule_may_set_another_field_of_some_groups() -> None:
    class Momentum(SchedulerBase):
        def get_updated_values(self, num_updates: int) -> Any:
            return None if num_updates == 3 else num_updates / 10

    optimizer = torch.optim.SGD(trainer_of().model.parameters(), lr=1.0, momentum=0.9)
    scheduler = Momentum(optimizer, param_group_field="momentum")
    scheduler.step_update(2)
    scheduler.step_update(3)
    assert optimizer.param_groups[0]["momentum"] == 0.2
    assert optimizer.param_groups[0]["initial_momentum"] == 0.9
    with pytest.raises(KeyError, match="beta"):
        Momentum(optimizer, param_group_field="beta")


def test_schedulers_of_timm_are_stepped_after_updates_and_epochs() -> None:
    class Told:
        def __init__(self, optimizer: Any) -> None:
            self.said: list[str] = []

        def step_update(self, num_updates: int) -> None:
            self.said.append(f"update {num_updates}")

        def step(self, epoch: int) -> None:
            self.said.append(f"epoch {epoch}")

    trainer = trainer_of(TrainerWithTimmScheduler)
    train(trainer, 2, data(2), data(1), create_scheduler_fn=Told)
    assert trainer.scheduler.said == ["update 1", "update 2", "epoch 1", "update 3", "update 4", "epoch 2"]


def test_native_sinks_get_the_metrics_of_the_run_history() -> None:
    noting = Noting()
    trainer = trainer_of(callbacks=[noting])
    train(trainer, 2, data(3), data(2))
    assert trainer.native_run is not None
    recorded = trainer.native_run.history["eval_loss_epoch"]
    assert [value for _, value in recorded] == trainer.run_history.get_metric_values("eval_loss_epoch")
    assert [step for step, _ in recorded] == [3, 6]
