"""A1-A7: the order, number and arguments of events; accumulation and limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.compat.accelerated.utils import worker_init_fn
from tests.compat.accelerated.parts import HERE, data, noting_trainer, train, trainer_of

TRAIN_STEP = ["on_train_step_start", "[calculate_train_batch_loss]", "on_train_step_end", "[backward_step]"]
UPDATE = ["[optimizer_step]", "[optimizer_zero_grad]"]
EVAL_STEP = ["on_eval_step_start", "[calculate_eval_batch_loss]", "on_eval_step_end"]
EVAL = ["[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP * 2, "[eval_epoch_end]", "on_eval_epoch_end"]
EPOCH = [
    *["[train_epoch_start]", "on_train_epoch_start", *(TRAIN_STEP + UPDATE) * 3],
    *["[train_epoch_end]", "on_train_epoch_end", *EVAL, "[training_run_epoch_end]", "on_training_run_epoch_end"],
]
RUN = ["[training_run_start]", "on_training_run_start", *EPOCH * 2, "[training_run_end]", "on_training_run_end"]


def test_a1_two_epochs_give_the_events_in_this_order() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), data(2))
    events = [name for name in noting.log if not name.startswith("[")]
    assert events == ["on_init_end", *(name for name in RUN if not name.startswith("["))]
    counts = Counter(events)
    assert (counts["on_train_step_end"], counts["on_eval_step_end"]) == (6, 4)
    assert (counts["on_training_run_epoch_end"], counts["on_training_run_end"]) == (2, 1)


def test_a2_each_hook_comes_before_the_event_of_its_name_and_the_scheduler_before_the_run() -> None:
    trainer, noting = noting_trainer()
    noting.log.clear()
    train(trainer, 2, data(3), data(2))
    assert noting.log == ["[create_train_dataloader]", "[create_eval_dataloader]", *RUN]
    noting.log.clear()
    train(trainer, 1, data(1), create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1))
    assert noting.log[:4] == [
        "[create_train_dataloader]",
        "[create_scheduler]",
        "[training_run_start]",
        "on_training_run_start",
    ]
    assert noting.log[8:12] == ["on_train_step_end", "[backward_step]", "[optimizer_step]", "[scheduler_step]"]


def test_a2_on_init_end_has_no_run_config() -> None:
    class Look(TrainerCallback):
        def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append(trainer.run_config)

        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            assert trainer.run_config is not None
            seen.append(trainer.run_config.num_epochs)

    seen: list[Any] = []
    train(trainer_of(callbacks=[Look]), 3, data(1))
    assert seen == [None, 3]


def test_a3_on_train_step_end_gets_batch_output_and_step_before_backward() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3))
    ends = noting.of("on_train_step_end")
    assert [end["step"] for end in ends] == [0, 1, 2, 0, 1, 2]
    assert all(set(end) == {"batch", "batch_output", "step"} for end in ends)
    assert set(ends[0]["batch_output"]) == {"loss", "model_outputs", "batch_size"}
    assert torch.equal(ends[1]["batch"][0], data(3).tensors[0][2:4])
    assert noting.log.index("on_train_step_end") < noting.log.index("[backward_step]")


def test_a3_a_loss_replaced_in_on_train_step_end_is_used() -> None:
    class Nothing(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            batch_output["loss"] = batch_output["loss"] * 0

    trainer = trainer_of(callbacks=[Nothing])
    train(trainer, 1, data(3))
    assert next(trainer.model.parameters()).item() == 0.5


def test_a4_evaluations_of_epochs_are_not_intermediate_and_epochs_count_from_one() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), data(2))
    assert noting.of("on_eval_epoch_start") == noting.of("on_eval_epoch_end") == [{"is_intermediate": False}] * 2
    at = {name: [epoch for seen, _, epoch in noting.seen if seen == name] for name, _, _ in noting.seen}
    assert at["on_train_epoch_start"] == at["on_train_epoch_end"] == at["on_training_run_epoch_end"] == [1, 2]
    assert at["on_eval_epoch_start"] == at["on_eval_epoch_end"] == [1, 2]
    assert at["on_training_run_end"] == [3]


def test_a5_five_batches_by_two_are_three_updates_after_batches_two_four_and_five() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 1, data(5), gradient_accumulation_steps=2)
    counts = Counter(noting.log)
    assert [counts[name] for name in ("on_train_step_start", "on_train_step_end", "[backward_step]")] == [5, 5, 5]
    assert [counts[name] for name in ("[optimizer_step]", "[optimizer_zero_grad]")] == [3, 3]
    steps = [name for name in noting.log if name in ("[backward_step]", "[optimizer_step]")]
    assert "".join(name[1] for name in steps) == "bbobbobo"
    assert trainer.run_config is not None
    assert trainer.run_config.num_update_steps_per_epoch == 3


def test_a6_the_loss_under_accumulation_is_the_true_one() -> None:
    plain, accumulated = trainer_of(lr=0.0), trainer_of(lr=0.0)
    train(plain, 1, data(8))
    train(accumulated, 1, data(8), gradient_accumulation_steps=4)
    losses = [one.run_history.get_latest_metric("train_loss_epoch") for one in (plain, accumulated)]
    assert losses[0] == losses[1]
    with torch.no_grad():
        whole = torch.nn.functional.mse_loss(plain.model(data(8).tensors[0]), data(8).tensors[1]).item()
    assert losses[0] == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a6_accumulated_batches_give_the_update_of_one_large_batch(accumulate: int) -> None:
    large, small = trainer_of(), trainer_of()
    train(large, 2, data(5, batch_size=1), batch_size=accumulate)
    train(small, 2, data(5, batch_size=1), batch_size=1, gradient_accumulation_steps=accumulate)
    for one, other in zip(large.model.parameters(), small.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


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
    assert trainer.run_config is not None
    assert trainer.run_config.num_epochs == 2


def test_a7_a_limit_beyond_the_epochs_does_not_extend_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), max_num_train_steps=10)
    assert Counter(noting.log)["on_train_step_end"] == 6
    train(trainer, 2, data(3))
    assert "limit" not in capsys.readouterr().out


def test_a_second_training_that_keeps_the_history_continues_to_count_epochs() -> None:
    trainer = trainer_of()
    train(trainer, 2, data(3))
    train(trainer, 2, data(3), reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    assert trainer.run_history.current_epoch == 5


def test_gradients_are_clipped_by_value_once_they_are_complete() -> None:
    trainer = trainer_of(lr=1.0)
    train(trainer, 1, data(2), gradient_clip_value=0.25, gradient_accumulation_steps=2)
    weight, bias = (parameter.item() for parameter in trainer.model.parameters())
    assert (weight, bias) == (0.75, 0.25)


def test_an_overridden_zero_grad_may_keep_gradients() -> None:
    class Keeping(Trainer):
        def optimizer_zero_grad(self) -> None:
            kept.append(next(self.model.parameters()).grad)

    kept: list[Any] = []
    trainer = trainer_of(Keeping)
    train(trainer, 1, data(2))
    assert kept[0] is kept[1]
    assert next(trainer.model.parameters()).grad is kept[1]


def test_each_loader_argument_replaces_a_default() -> None:
    trainer = trainer_of()
    sampler = torch.utils.data.SequentialSampler(data(4))
    trainer.train(
        data(4),
        1,
        data(2),
        2,
        train_dataloader_kwargs={**HERE, "sampler": sampler, "batch_size": 4},
        eval_dataloader_kwargs=HERE,
    )
    config = trainer.run_config
    assert config is not None
    given = {"sampler": sampler, "batch_size": 4, "num_workers": 0, "pin_memory": False}
    assert config.to_dict()["train_dl_kwargs"] == {**given, "worker_init_fn": worker_init_fn}
    assert (config.train_per_device_batch_size, config["eval_per_device_batch_size"]) == (4, 2)
    assert trainer.get_default_train_dl_kwargs(8)["shuffle"] is True
    assert trainer.get_default_eval_dl_kwargs(8)["shuffle"] is False
