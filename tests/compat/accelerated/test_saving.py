"""A15-A17: the best model, averaged weights; checkpoints in one file."""

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
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TrainerCallback,
)
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.errors import CheckpointFormatError, StateError
from tests.compat.accelerated.parts import (
    Noting,
    Scripted,
    ScriptedTrainer,
    data,
    noting_trainer,
    train,
    trainer_of,
)


class Results(TrainerCallback):
    """Reports one result per epoch, and sets the weight to the number of the epoch."""

    def __init__(self, *results: float) -> None:
        self.results = results

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        trainer.run_history.update_metric("result", self.results[epoch - 1])
        with torch.no_grad():
            weight_of(trainer).fill_(epoch)


def weight_of(trainer: Trainer) -> nn.Parameter:
    return next(trainer.get_model().parameters())


class Saving(Trainer):
    """Records the epochs in which a checkpoint was saved."""

    saved: tuple[int, ...] = ()

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.saved = (*self.saved, self.run_history.current_epoch)
        super().save_checkpoint(*arguments, **keywords)


def test_a15_the_model_is_saved_when_a_metric_improves_and_loaded_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "best.pt"
    save = SaveBestModelCallback(path, watch_metric="result")
    trainer = trainer_of(Saving, [Results(3, 1, 2, 1), save], lr=0.0)
    train(trainer, 4, data(1), data(1))
    assert isinstance(trainer, Saving)
    assert trainer.saved == (1, 2)
    assert weight_of(trainer).item() == 2
    saved = torch.load(path, weights_only=True)
    assert set(saved) == {"model_state_dict", "optimizer_state_dict", "result", "loss"}
    assert (saved["result"], saved["loss"]) == (1.0, 1.0)
    assert (save.best_metric, save.best_metric_epoch) == (1.0, 2)


def test_a15_the_file_has_the_same_keys_if_the_first_epoch_is_the_best(tmp_path: Path) -> None:
    save = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="result", save_optimizer=False, save_scheduler=False)
    trainer = trainer_of(callbacks=[Results(1, 2, 3), save])
    schedule = torch.optim.lr_scheduler.ExponentialLR
    train(trainer, 3, data(1), data(1), create_scheduler_fn=lambda optimizer: schedule(optimizer, 0.5))
    assert set(torch.load(tmp_path / "best.pt", weights_only=True)) == {"model_state_dict", "result", "loss"}


def test_a15_a_numpy_metric_is_saved_as_a_plain_number(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.save_checkpoint(tmp_path / "one.pt", checkpoint_kwargs={"f1": np.float64(0.5)})
    assert trainer.load_checkpoint(tmp_path / "one.pt")["f1"] == 0.5


def test_a16_another_training_resets_the_best_value_unless_reset_on_train_is_false(tmp_path: Path) -> None:
    for reset, best in ((False, 4.0), (True, 8.0)):
        save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", reset_on_train=reset)
        trainer = trainer_of(ScriptedTrainer, [save])
        for first, second in ((5.0, 4.0), (9.0, 8.0)):
            train(trainer, 2, ByEpoch(first, second), batch_size=1)
        assert save.best_metric == best


class ByEpoch(Scripted):
    """One sample with another loss in each epoch."""

    def __init__(self, *losses: float) -> None:
        super().__init__(*losses)
        self._next = iter(losses)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1), torch.tensor(next(self._next))

    def __len__(self) -> int:
        return 1


def test_a_stop_before_the_first_save_loads_no_file_of_an_earlier_run(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            raise StopTrainingError("at once")

    (tmp_path / "best.pt").write_text("of an earlier run")
    train(trainer_of(callbacks=[SaveBestModelCallback(tmp_path / "best.pt"), Stop]), 1, data(1), data(1))


def test_a_checkpoint_holds_optimizer_and_scheduler_and_needs_a_trainer_that_has_them(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = trainer_of()
    train(trainer, 1, data(2), create_scheduler_fn=schedule)
    trainer.save_checkpoint(tmp_path / "one.pt")
    fresh = trainer_of()
    with pytest.raises(ValueError, match="holds the state of a scheduler, but the trainer has none"):
        fresh.load_checkpoint(tmp_path / "one.pt")
    assert weight_of(fresh).item() == 0.5
    fresh.load_checkpoint(tmp_path / "one.pt", load_scheduler=False)
    assert weight_of(fresh).item() == weight_of(trainer).item()
    assert fresh.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


class Path2(TrainerCallback):
    """Sets the weight to 2 and 4 at the ends of the epochs."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        with torch.no_grad():
            weight_of(trainer).fill_(2.0 * trainer.run_history.current_epoch)


def test_a17_the_average_is_updated_once_an_epoch_from_a_copy_of_the_first_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Look(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append((weight_of(trainer).item(), next(ema.ema_model.module.parameters()).item()))

    seen: list[tuple[float, float]] = []
    ema: Any = ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = trainer_of(callbacks=[Path2, ema, Look], lr=0.0)
    with torch.no_grad():
        weight_of(trainer).fill_(0.0)
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
    counts, history = Counter(noting.log), trainer.run_history
    assert counts["on_eval_epoch_end"] == 2
    assert counts["[eval_epoch_start]"] == counts["[eval_epoch_end]"] == 4
    assert len(history.get_metric_values("eval_loss_epoch")) == len(history.get_metric_values("ema_model_eval_loss_epoch")) == 2
    assert Counter(inner.log) == {
        "on_eval_epoch_start": 2,
        "on_eval_step_start": 4,
        "on_eval_step_end": 4,
        "on_eval_epoch_end": 2,
    }
    assert ema.best_metric == min(history.get_metric_values("ema_model_eval_loss_epoch"))
    losses = [history.get_latest_metric(name) for name in ("eval_loss_epoch", "ema_model_eval_loss_epoch")]
    assert losses[0] < losses[1]  # the average is behind
    trainer.evaluate(data(2), per_device_batch_size=2, dataloader_kwargs={"num_workers": 0})
    assert history.get_metric_names() == {"evaluation_loss", "ema_model_evaluation_loss"}


def test_a17_a_stop_in_the_evaluation_of_the_average_restores_the_trainer(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            raise StopTrainingError("inside")

    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=(Stop,))
    noting = Noting()
    trainer = trainer_of(callbacks=[Path2, ema, noting], lr=0.0)
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

    trainer = trainer_of()
    train(trainer, 1, data(1), create_scheduler_fn=Steps)
    trainer.save_checkpoint(tmp_path / "one.pt")
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
