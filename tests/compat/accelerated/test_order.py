"""A1-A7 and A19: the order, number and arguments of hooks and events; evaluation runs; accumulation and limits."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.compat.accelerated.utils import worker_init_fn
from tests.compat.accelerated.parts import (
    HERE,
    Hooks,
    Noting,
    NotingTrainer,
    Scripted,
    ScriptedTrainer,
    config_of,
    data,
    metrics_of,
    noting_trainer,
    run_of,
    train,
    trainer_of,
    weights_of,
)

TRAIN_STEP = ["on_train_step_start", "[calculate_train_batch_loss]", "on_train_step_end", "[backward_step]"]
UPDATE = ["[optimizer_step]", "[optimizer_zero_grad]"]
EVAL_STEP = ["on_eval_step_start", "[calculate_eval_batch_loss]", "on_eval_step_end"]
EVAL = ["[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP * 2, "[eval_epoch_end]", "on_eval_epoch_end"]


EPOCH = [
    *["[train_epoch_start]", "on_train_epoch_start", *(TRAIN_STEP + UPDATE) * 3],
    *["[train_epoch_end]", "on_train_epoch_end", *EVAL, "[training_run_epoch_end]", "on_training_run_epoch_end"],
]


RUN = ["[training_run_start]", "on_training_run_start", *EPOCH * 2, "[training_run_end]", "on_training_run_end"]


def test_a1_to_a4_two_epochs_give_these_hooks_and_events_in_this_order_with_these_arguments() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), data(2))
    assert noting.log == ["on_init_end", "[create_train_dataloader]", "[create_eval_dataloader]", *RUN]
    ends = noting.of("on_train_step_end")
    assert [end["step"] for end in ends] == [0, 1, 2, 0, 1, 2]
    assert all(set(end) == {"batch", "batch_output", "step"} for end in ends)
    assert set(ends[0]["batch_output"]) == {"loss", "model_outputs", "batch_size"}
    assert torch.equal(ends[1]["batch"][0], data(3).tensors[0][2:4])
    assert noting.of("on_eval_epoch_start") == noting.of("on_eval_epoch_end") == [{"is_intermediate": False}] * 2
    at = {name: [epoch for seen, _, epoch in noting.seen if seen == name] for name, _, _ in noting.seen}
    assert at["on_train_epoch_start"] == at["on_train_epoch_end"] == at["on_training_run_epoch_end"] == [1, 2]
    assert at["on_eval_epoch_start"] == at["on_eval_epoch_end"] == [1, 2]
    assert at["on_training_run_end"] == [3]


class Around(NotingTrainer):
    """Records where each part that may be overridden begins and ends."""

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

    def _run_train_epoch(self, train_dl: Any) -> bool:
        self.log.append("train epoch" if train_dl is self._train_dataloader else "another loader")
        reached = super()._run_train_epoch(train_dl)
        self.log.append(f"train epoch: {reached}")
        return reached

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
    trainer = trainer_of(Around, [noting])
    noting.log.clear()
    assert isinstance(trainer, Around)
    return trainer


def test_the_parts_of_a_training_are_called_in_this_order() -> None:
    trainer = around()
    train(trainer, 1, data(1), data(1), create_scheduler_fn=partial(ExponentialLR, gamma=0.1))
    assert trainer.log == [
        *["[create_train_dataloader]", "[create_eval_dataloader]", "prepare", "config", "[create_scheduler]", "training"],
        *["[training_run_start]", "on_training_run_start", "train epoch", "[train_epoch_start]", "on_train_epoch_start"],
        *[*TRAIN_STEP, "[optimizer_step]", "[scheduler_step]", "[optimizer_zero_grad]"],
        *["[train_epoch_end]", "on_train_epoch_end", "train epoch: False"],
        *["eval epoch", "[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["evaluated", "[training_run_epoch_end]", "on_training_run_epoch_end", "[training_run_end]", "on_training_run_end"],
        "trained",
    ]
    train(trainer, 2, data(2), max_num_train_steps=3)
    assert [line for line in trainer.log if line.startswith("train epoch: ")][1:] == ["train epoch: False", "train epoch: True"]


def test_a19_an_evaluation_run_has_its_own_order_resets_the_history_and_needs_no_training() -> None:
    trainer = around()
    trainer.evaluate(data(1), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.log == [
        *["[create_eval_dataloader]", "prepare", "config", "evaluation", "[evaluation_run_start]", "on_evaluation_run_start"],
        *["eval epoch", "[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["evaluated", "[evaluation_run_end]", "on_evaluation_run_end", "over"],
    ]
    train(trainer, 2, data(3), data(2))
    trainer.evaluate(data(1), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}
    assert trainer.run_history.current_epoch == 1
    config = config_of(trainer)
    assert (config.num_epochs, config.train_dl_kwargs, config.eval_per_device_batch_size) == (1, None, 2)
    scripted = trainer_of(ScriptedTrainer)
    scripted.evaluate(Scripted(1.0, 2.0, 6.0), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert scripted.run_history.get_latest_metric("evaluation_loss") == 3.0  # over samples
    assert config_of(scripted).to_dict()["num_update_steps_per_epoch"] == 0
    with pytest.raises(ValueError, match="evaluate needs a dataset"):
        trainer_of().evaluate()


def test_a2_on_init_end_has_no_run_config() -> None:
    class Look(TrainerCallback):
        def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append(trainer.run_config)

        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append(config_of(trainer).num_epochs)

    seen: list[Any] = []
    train(trainer_of(callbacks=[Look]), 3, data(1))
    assert seen == [None, 3]


def test_a3_a_loss_replaced_in_on_train_step_end_is_used() -> None:
    nothing = Hooks(on_train_step_end=lambda trainer, batch_output, **_: batch_output.update(loss=batch_output["loss"] * 0))
    trainer = train(trainer_of(callbacks=[nothing]), 1, data(3))
    assert weights_of(trainer).tolist() == [0.5, 0.0]


def test_a5_five_batches_by_two_are_three_updates_after_batches_two_four_and_five() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 1, data(5), gradient_accumulation_steps=2)
    counts = Counter(noting.log)
    assert counts["on_train_step_start"] == counts["on_train_step_end"] == counts["[backward_step]"] == 5
    assert counts["[optimizer_step]"] == counts["[optimizer_zero_grad]"] == config_of(trainer).num_update_steps_per_epoch == 3
    steps = [name for name in noting.log if name in ("[backward_step]", "[optimizer_step]")]
    assert "".join(name[1] for name in steps) == "bbobbobo"


def test_a6_the_loss_under_accumulation_is_the_true_one() -> None:
    plain, accumulated = (train(trainer_of(lr=0.0), 1, data(8), gradient_accumulation_steps=steps) for steps in (1, 4))
    assert metrics_of(plain) == metrics_of(accumulated)
    inputs, targets = data(8).tensors
    with torch.no_grad():
        whole = torch.nn.functional.mse_loss(plain.model(inputs), targets).item()
    assert metrics_of(plain)["train_loss_epoch"] == [pytest.approx(whole, rel=1e-6)]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a6_accumulated_batches_give_the_update_of_one_large_batch(accumulate: int) -> None:
    large = train(trainer_of(), 2, data(5, batch_size=1), batch_size=accumulate)
    small = train(trainer_of(), 2, data(5, batch_size=1), batch_size=1, gradient_accumulation_steps=accumulate)
    assert torch.allclose(weights_of(large), weights_of(small), atol=1e-6)


def test_a7_the_limit_of_steps_ends_the_run_normally(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, noting = noting_trainer()
    train(trainer, 9, data(3), data(2), max_num_train_steps=4)
    counts = Counter(noting.log)
    assert counts["on_train_step_end"] == counts["[optimizer_step]"] == 4
    assert counts["on_train_epoch_end"] == counts["on_eval_epoch_end"] == counts["on_training_run_epoch_end"] == 2
    assert trainer.run_history.current_epoch == 3
    assert "on_stop_training_error" not in counts
    assert noting.log[-1] == "on_training_run_end"
    assert "limit of 4 training steps was reached in epoch 2" in capsys.readouterr().out
    assert config_of(trainer).num_epochs == 2
    noting.log.clear()
    train(trainer, 2, data(3), max_num_train_steps=10)  # a limit beyond the epochs does not extend the training
    assert Counter(noting.log)["on_train_step_end"] == 6
    train(trainer, 2, data(3))
    assert "limit" not in capsys.readouterr().out


def test_a_second_training_that_keeps_the_history_continues_to_count_epochs() -> None:
    trainer = train(trainer_of(), 2, data(3))
    train(trainer, 2, data(3), reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    assert trainer.run_history.current_epoch == 5


def test_gradients_are_clipped_by_value_once_they_are_complete_or_by_an_override() -> None:
    class Zero(Trainer):
        def _clip_gradients(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad = None

    class Norm(Trainer):
        def _clip_gradients(self) -> None:
            value = config_of(self).gradient_clip_value
            assert value is not None
            self._accelerator.clip_grad_norm_(self.model.parameters(), value)

    trainer = train(trainer_of(lr=1.0), 1, data(2), gradient_clip_value=0.25, gradient_accumulation_steps=2)
    assert weights_of(trainer).tolist() == [0.75, 0.25]
    assert weights_of(train(trainer_of(Zero), 1, data(2), gradient_clip_value=1.0)).tolist() == [0.5, 0.0]
    norm = train(trainer_of(Norm, lr=1.0), 1, data(1), gradient_clip_value=0.25)
    assert (weights_of(norm) - weights_of(trainer_of())).norm().item() == pytest.approx(0.25, rel=1e-4)


def test_an_overridden_zero_grad_may_keep_gradients() -> None:
    class Keeping(Trainer):
        def optimizer_zero_grad(self) -> None:
            kept.append(next(self.model.parameters()).grad)

    kept: list[Any] = []
    trainer = train(trainer_of(Keeping), 1, data(2))
    assert kept[0] is kept[1] is next(trainer.model.parameters()).grad


def test_each_loader_argument_replaces_a_default() -> None:
    trainer, rows = trainer_of(), data(4)
    sampler = torch.utils.data.SequentialSampler(rows)
    kwargs = {**HERE, "sampler": sampler, "batch_size": 4}
    trainer.train(rows, 1, data(2), 2, train_dataloader_kwargs=kwargs, eval_dataloader_kwargs=HERE)
    config = config_of(trainer)
    assert config.to_dict()["train_dl_kwargs"] == {**kwargs, "pin_memory": False, "worker_init_fn": worker_init_fn}
    assert (config.train_per_device_batch_size, config["eval_per_device_batch_size"]) == (4, 2)
    assert trainer.get_default_train_dl_kwargs(8)["shuffle"] is True
    assert trainer.get_default_eval_dl_kwargs(8)["shuffle"] is False
    batches = {**HERE, "batch_sampler": torch.utils.data.BatchSampler(sampler, 3, drop_last=False)}  # for shuffle and size
    trainer.train(rows, 1, train_dataloader_kwargs=batches)
    assert run_of(trainer).progress.batch == 3
