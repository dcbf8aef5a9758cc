"""A15-A17: the best model, averaged weights, checkpoints in one file; and states that a training resumes bit-identically."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadenza.compat.accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TrainerCallback,
)
from cadenza.compat.accelerated.schedulers import CosineLrScheduler
from cadenza.compat.accelerated.tracking import LossTracker, loss_of_rank
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.errors import CheckpointFormatError, StateError
from tests.compat.accelerated.parts import (
    HERE,
    Dropping,
    Hooks,
    Noting,
    Scripted,
    ScriptedTrainer,
    data,
    metrics_of,
    names,
    noting_trainer,
    train,
    trainer_of,
    weights_of,
)

EXPONENTIAL = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def weight_of(trainer: Trainer) -> nn.Parameter:
    return next(trainer.get_model().parameters())


def set_weight(trainer: Trainer, value: float) -> None:
    nn.init.constant_(weight_of(trainer), value)


def results(*values: float) -> TrainerCallback:
    """Return a callback that reports one result per epoch, and sets the weight to the number of the epoch."""

    def report(trainer: Trainer, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        trainer.run_history.update_metric("result", values[epoch - 1])
        set_weight(trainer, epoch)

    return Hooks(on_eval_epoch_end=report)


class Saving(Trainer):
    """Records the epochs in which a checkpoint was saved."""

    saved: tuple[int, ...] = ()

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.saved = (*self.saved, self.run_history.current_epoch)
        super().save_checkpoint(*arguments, **keywords)


def test_a15_the_model_is_saved_when_a_metric_improves_and_loaded_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "best.pt"
    save = SaveBestModelCallback(path, watch_metric="result")
    trainer: Any = train(trainer_of(Saving, [results(3, 1, 2, 1), save], lr=0.0), 4, data(1), data(1))
    assert trainer.saved == (1, 2)
    assert weight_of(trainer).item() == 2
    saved = torch.load(path, weights_only=True)
    assert set(saved) == {"model_state_dict", "optimizer_state_dict", "result", "loss"}
    assert (saved["result"], saved["loss"]) == (1.0, 1.0)
    assert (save.best_metric, save.best_metric_epoch) == (1.0, 2)
    save = SaveBestModelCallback(path, watch_metric="result", save_optimizer=False, save_scheduler=False)
    train(trainer_of(callbacks=[results(1, 2, 3), save]), 3, data(1), data(1), create_scheduler_fn=EXPONENTIAL)
    assert set(torch.load(path, weights_only=True)) == {"model_state_dict", "result", "loss"}  # the first epoch is the best


@pytest.mark.parametrize(("reset", "best"), [(False, 4.0), (True, 8.0)])
def test_a16_another_training_resets_the_best_value_unless_reset_on_train_is_false(
    reset: bool, best: float, tmp_path: Path
) -> None:
    class ByEpoch(Scripted):
        """One sample with another loss in each epoch."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(1), torch.tensor(next(losses))

        def __len__(self) -> int:
            return 1

    losses = iter((5.0, 4.0, 9.0, 8.0))
    save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", reset_on_train=reset)
    trainer = trainer_of(ScriptedTrainer, [save])
    for _ in range(2):
        train(trainer, 2, ByEpoch(), batch_size=1)
    assert save.best_metric == best


def test_a_stop_before_the_first_save_loads_no_file_of_an_earlier_run(tmp_path: Path) -> None:
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("at once")

    (tmp_path / "best.pt").write_text("of an earlier run")
    callbacks = [SaveBestModelCallback(tmp_path / "best.pt"), Hooks(on_train_epoch_start=stop)]
    train(trainer_of(callbacks=callbacks), 1, data(1), data(1))


def test_a_checkpoint_holds_optimizer_and_scheduler_and_needs_a_trainer_that_has_them(tmp_path: Path) -> None:
    trainer = train(trainer_of(), 1, data(2), create_scheduler_fn=EXPONENTIAL)
    trainer.save_checkpoint(tmp_path / "one.pt", checkpoint_kwargs={"f1": np.float64(0.5)})
    fresh = trainer_of()
    with pytest.raises(ValueError, match="holds the state of a scheduler, but the trainer has none"):
        fresh.load_checkpoint(tmp_path / "one.pt")
    assert weight_of(fresh).item() == 0.5
    assert fresh.load_checkpoint(tmp_path / "one.pt", load_scheduler=False)["f1"] == 0.5  # a plain number
    assert weight_of(fresh).item() == weight_of(trainer).item()
    assert fresh.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def doubling() -> TrainerCallback:
    """Return a callback that sets the weight to 2 and 4 at the ends of the epochs."""
    return Hooks(on_train_epoch_end=lambda trainer, **_: set_weight(trainer, 2.0 * trainer.run_history.current_epoch))


def test_a17_the_average_is_updated_once_an_epoch_from_a_copy_of_the_first_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Look(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append((weight_of(trainer).item(), next(ema.ema_model.module.parameters()).item()))

    seen: list[tuple[float, float]] = []
    ema: Any = ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = trainer_of(callbacks=[doubling(), ema, Look], lr=0.0)
    set_weight(trainer, 0.0)
    train(trainer, 2, data(1))
    assert seen == [(2.0, 1.0), (4.0, 2.5)]
    assert torch.load(tmp_path / "ema.pt", weights_only=True)["model_state_dict"]["weight"].item() == 2.5
    assert weight_of(trainer).item() == 4.0
    assert "Nothing was saved" not in capsys.readouterr().out


def test_a17_the_evaluation_of_the_average_calls_hooks_but_no_other_callbacks(tmp_path: Path) -> None:
    inner = Noting()
    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=(inner,))
    trainer, noting = noting_trainer(ema)
    train(trainer, 2, data(3), data(2), create_scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=1.0))
    saved = {"model_state_dict", "scheduler_state_dict", "ema_model_eval_loss_epoch", "loss"}
    assert set(torch.load(tmp_path / "ema.pt", weights_only=True)) == saved
    counts, metrics = Counter(noting.log), metrics_of(trainer)
    assert counts["on_eval_epoch_end"] == 2
    assert counts["[eval_epoch_start]"] == counts["[eval_epoch_end]"] == 4
    assert len(metrics["eval_loss_epoch"]) == len(metrics["ema_model_eval_loss_epoch"]) == 2
    steps = {"on_eval_step_start": 4, "on_eval_step_end": 4}
    assert Counter(inner.log) == {"on_eval_epoch_start": 2, **steps, "on_eval_epoch_end": 2}
    assert ema.best_metric == min(metrics["ema_model_eval_loss_epoch"])
    assert metrics["eval_loss_epoch"][-1] < metrics["ema_model_eval_loss_epoch"][-1]  # the average is behind
    trainer.evaluate(data(2), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss", "ema_model_evaluation_loss"}


def test_a17_a_stop_in_the_evaluation_of_the_average_restores_the_trainer(tmp_path: Path) -> None:
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("inside")

    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=(Hooks(on_eval_step_end=stop),))
    noting = Noting()
    trainer = trainer_of(callbacks=[doubling(), ema, noting], lr=0.0)
    handler = trainer.callback_handler
    train(trainer, 2, data(1), data(2))
    assert weight_of(trainer).item() == 2.0
    assert trainer.callback_handler is handler
    assert trainer.run_history.metric_name_prefix == ""
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]


def test_a_scheduler_without_a_state_is_left_out_and_a_message_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Steps:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            pass

        def step(self) -> None:
            pass

    train(trainer_of(), 1, data(1), create_scheduler_fn=Steps).save_checkpoint(tmp_path / "one.pt")
    assert "scheduler_state_dict" not in torch.load(tmp_path / "one.pt")
    assert "Steps has no state_dict, so its state is not saved" in capsys.readouterr().out
    states = SaveTrainingStateCallback(tmp_path / "states")
    with pytest.raises(StateError, match="Steps has no state_dict, so a training cannot resume with it"):
        train(trainer_of(callbacks=[states]), 1, data(1), create_scheduler_fn=Steps)


def test_a_checkpoint_of_the_original_with_a_number_of_numpy_is_loaded_and_one_with_code_is_not(tmp_path: Path) -> None:
    class Executed:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    trainer = trainer_of()
    path = tmp_path / "one.pt"
    content = {"model_state_dict": trainer.model.state_dict(), "accuracy": np.float64(0.5), "f1": np.float32(0.25)}
    torch.save(content, path)
    loaded = trainer.load_checkpoint(path)
    assert (loaded["accuracy"], loaded["f1"]) == (0.5, 0.25)
    torch.save({**content, "extra": Executed()}, path)
    with pytest.raises(CheckpointFormatError, match=r"one.pt' cannot be read without executing code in it"):
        trainer.load_checkpoint(path)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError):
        trainer.load_checkpoint(tmp_path / "nowhere.pt")
    torch.save(trainer.model.state_dict(), path)
    with pytest.raises(CheckpointFormatError, match=r"expected the key 'model_state_dict'; got \['bias', 'weight'\]"):
        trainer.load_checkpoint(path)


# -- states to resume ---------------------------------------------------------------------------------------------


def made(folder: Path, *more: TrainerCallback) -> Trainer:
    torch.manual_seed(3)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    best = SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False)
    ema = ModelEmaCallback(0.5, save_path=folder / "ema.pt")
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=(best, ema, EarlyStoppingCallback(9), *more))


def run(trainer: Trainer, **more: Any) -> list[Any]:
    """Train four epochs; return the state at their end."""
    schedule = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)
    order = {**HERE, "shuffle": True}
    arguments = {"train_dataloader_kwargs": order, "create_scheduler_fn": schedule, "gradient_accumulation_steps": 2, **more}
    train(trainer, 4, data(5, 4), data(2, 4), 4, **arguments)
    best, _, stop, *_ = trainer.callback_handler
    states = [trainer.scheduler.state_dict(), best.state_dict(), stop.state_dict()]
    return [weights_of(trainer).tolist(), metrics_of(trainer), trainer.run_history.current_epoch, *states]


def test_a_resumed_training_is_bit_identical(tmp_path: Path) -> None:
    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1, save_every_n_steps=2)
    whole = run(made(tmp_path, save))
    assert whole[2] == 5
    for name in ("epoch_2", "step_2", "step_8", "step_14"):
        continued = made(tmp_path, SaveTrainingStateCallback(tmp_path / "others"))
        assert run(continued, resume_from=tmp_path / "states" / name) == whole, name


def test_a_finished_training_resumes_for_more_epochs_and_a_state_is_replaced_or_one_of_the_newest(tmp_path: Path) -> None:
    trainer = train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), 2, data(3))
    assert names(tmp_path) == ["final"]
    train(trainer, 3, data(3), resume_from=tmp_path / "final")
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 3
    train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), 1, data(2))
    assert trainer_of().load_training_state(tmp_path / "final") == {"current_epoch": 2, "global_step": 2}
    newest = tmp_path / "newest"
    save = SaveTrainingStateCallback(newest, save_every_n_epochs=1, save_every_n_steps=3, max_checkpoints=2)
    train(trainer_of(callbacks=[save]), 3, data(3))
    assert names(newest) == ["epoch_3", "final"]


def test_a_state_of_a_step_has_the_weights_after_its_update(tmp_path: Path) -> None:
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        if (tmp_path / "states").exists():
            raise StopTrainingError("there is one")

    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1, save_at_end=False)
    trainer = train(trainer_of(callbacks=[save, Hooks(on_train_step_start=stop)]), 1, data(3))
    fresh = trainer_of()
    assert fresh.load_training_state(tmp_path / "states" / "step_1") == {"current_epoch": 1, "global_step": 1}
    assert weight_of(fresh).item() == weight_of(trainer).item() != weight_of(trainer_of()).item()


def test_checkpoint_kwargs_are_returned_and_a_folder_without_a_state_is_an_error(tmp_path: Path) -> None:
    def save(trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_training_state(tmp_path / "mine", checkpoint_kwargs={"note": "the last"})

    trainer = trainer_of(callbacks=[Hooks(on_training_run_end=save)])
    with pytest.raises(RuntimeError, match="save_training_state needs a training in progress"):
        save(trainer)
    train(trainer, 1, data(1), create_scheduler_fn=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2]))
    assert trainer.load_training_state(tmp_path / "mine") == {"current_epoch": 2, "note": "the last"}
    with pytest.raises(FileNotFoundError, match=r"nowhere.*save_training_state"):
        train(trainer, 1, data(1), resume_from=tmp_path / "nowhere")


def test_a_resumed_training_knows_the_earlier_best_value(tmp_path: Path) -> None:
    def best(**more: Any) -> tuple[float | None, int | None]:
        save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
        train(trainer_of(callbacks=[save, states], lr=1.2), 3, data(3), **more)  # so fast that the loss grows
        return save.best_metric, save.best_metric_epoch

    whole = best()
    assert best(resume_from=tmp_path / "states" / "epoch_1") == whole
    assert whole[1] == 1


def test_a_state_of_an_earlier_cadenza_without_the_count_of_batches_continues_it(tmp_path: Path) -> None:
    class Earlier(SaveTrainingStateCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"saved": super().state_dict()["saved"]}

    train(trainer_of(callbacks=[Earlier(tmp_path / "states", save_every_n_steps=2)]), 1, data(3))
    save = SaveTrainingStateCallback(tmp_path / "then", save_every_n_steps=2)
    save.name = "Earlier"
    train(trainer_of(callbacks=[save]), 2, data(3), resume_from=tmp_path / "states" / "final")
    assert names(tmp_path / "then") == ["final", "step_4", "step_6"]


def test_on_another_number_of_processes_the_first_one_gets_the_losses_of_all() -> None:
    states = [{"last": loss, "total": 3 * loss, "count": 3} for loss in (1.0, 2.0)]
    one, other = LossTracker(), LossTracker()
    one.load_state_dict(loss_of_rank(states, 0, 1))
    other.load_state_dict(loss_of_rank(states, 1, 3))
    assert (one.total_loss, one.running_count, other.total_loss, other.running_count) == (9.0, 6, 0.0, 0)
    assert loss_of_rank(states, 1, 2) is states[1]
