"""Training states: saved at step boundaries, resumed with bit-identical results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

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
from tests.compat.accelerated.parts import HERE, data, train, trainer_of
from tests.compat.accelerated.test_two_processes import on_two

SHUFFLED = {"num_workers": 0, "shuffle": True}


class Dropping(nn.Module):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def made(folder: Path, *more: TrainerCallback) -> Trainer:
    torch.manual_seed(3)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    best = SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False)
    ema = ModelEmaCallback(0.5, save_path=folder / "ema.pt")
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=(best, ema, EarlyStoppingCallback(9), *more))


def run(trainer: Trainer, **more: Any) -> None:
    arguments = {"train_dataloader_kwargs": SHUFFLED, "eval_dataloader_kwargs": HERE, "create_scheduler_fn": SCHEDULE}
    trainer.train(data(5, 4), 4, data(2, 4), 4, gradient_accumulation_steps=2, **{**arguments, **more})


SCHEDULE = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)


def state_of(trainer: Trainer) -> list[Any]:
    history = trainer.run_history
    metrics = {name: history.get_metric_values(name) for name in sorted(history.get_metric_names())}
    weights = [weight.tolist() for weight in trainer.get_model().state_dict().values()]
    best, _, stop, *_ = trainer.callback_handler
    return [weights, metrics, history.current_epoch, trainer.scheduler.state_dict(), best.state_dict(), stop.state_dict()]


@pytest.mark.parametrize("name", ["epoch_2", "step_2", "step_8", "step_14"])
def test_a_resumed_training_is_bit_identical(name: str, tmp_path: Path) -> None:
    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1, save_every_n_steps=2)
    whole = made(tmp_path, save)
    run(whole)
    continued = made(tmp_path, SaveTrainingStateCallback(tmp_path / "others"))
    run(continued, resume_from=tmp_path / "states" / name)
    assert state_of(continued) == state_of(whole)
    assert continued.run_history.current_epoch == 5


def test_a_finished_training_resumes_for_more_epochs(tmp_path: Path) -> None:
    trainer = trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path / "states")])
    train(trainer, 2, data(3))
    assert [folder.name for folder in (tmp_path / "states").iterdir()] == ["final"]
    train(trainer, 3, data(3), resume_from=tmp_path / "states" / "final")
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 3


def test_a_state_of_a_step_has_the_weights_after_its_update(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            if (tmp_path / "states").exists():
                raise StopTrainingError("there is one")

    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1, save_at_end=False)
    trainer = trainer_of(callbacks=[save, Stop])
    train(trainer, 1, data(3))
    fresh = trainer_of()
    assert fresh.load_training_state(tmp_path / "states" / "step_1") == {"current_epoch": 1, "global_step": 1}
    weight, first = (next(one.model.parameters()).item() for one in (fresh, trainer_of()))
    assert weight == next(trainer.model.parameters()).item() != first


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    save = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, save_every_n_steps=3, max_checkpoints=2)
    train(trainer_of(callbacks=[save]), 3, data(3))
    assert {folder.name for folder in tmp_path.iterdir()} == {"epoch_3", "final"}


def test_checkpoint_kwargs_are_returned_and_a_folder_without_a_state_is_an_error(tmp_path: Path) -> None:
    class Save(TrainerCallback):
        def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.save_training_state(tmp_path / "mine", checkpoint_kwargs={"note": "the last"})

    trainer = trainer_of(callbacks=[Save])
    with pytest.raises(RuntimeError, match="save_training_state needs a training in progress"):
        trainer.save_training_state(tmp_path / "mine")
    schedule = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2])
    train(trainer, 1, data(1), create_scheduler_fn=schedule)
    assert trainer.load_training_state(tmp_path / "mine") == {"current_epoch": 2, "note": "the last"}
    with pytest.raises(FileNotFoundError, match=r"nowhere.*save_training_state"):
        train(trainer, 1, data(1), resume_from=tmp_path / "nowhere")


def test_a_resumed_training_knows_the_earlier_best_value(tmp_path: Path) -> None:
    def best(**more: Any) -> SaveBestModelCallback:
        save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
        train(trainer_of(callbacks=[save, states], lr=1.2), 3, data(3), **more)  # so fast that the loss grows
        return save

    whole = best()
    continued = best(resume_from=tmp_path / "states" / "epoch_1")
    assert (continued.best_metric, continued.best_metric_epoch) == (whole.best_metric, whole.best_metric_epoch)
    assert whole.best_metric_epoch == 1


def test_a_state_replaces_the_state_of_an_earlier_training(tmp_path: Path) -> None:
    for epochs in (3, 1):
        train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), epochs, data(2))
    assert trainer_of().load_training_state(tmp_path / "final") == {"current_epoch": 2, "global_step": 2}


def test_a_state_of_an_earlier_cadenza_without_the_count_of_batches_continues_it(tmp_path: Path) -> None:
    class Earlier(SaveTrainingStateCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"saved": super().state_dict()["saved"]}

    train(trainer_of(callbacks=[Earlier(tmp_path / "states", save_every_n_steps=2)]), 1, data(3))
    save = SaveTrainingStateCallback(tmp_path / "then", save_every_n_steps=2)
    save.name = "Earlier"
    train(trainer_of(callbacks=[save]), 2, data(3), resume_from=tmp_path / "states" / "final")
    assert {folder.name for folder in (tmp_path / "then").iterdir()} == {"step_4", "step_6", "final"}


def test_a_training_continues_on_two_processes_with_the_losses_of_each(tmp_path: Path) -> None:
    class Save(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, step: int = 0, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == 2 and step == 1:
                trainer.save_training_state(tmp_path / "inside")

        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.save_training_state(tmp_path / f"epoch_{trainer.run_history.current_epoch}")

    def trained(*more: TrainerCallback, **resume: Any) -> list[Any]:
        trainer = trainer_of(callbacks=more)
        train(trainer, 3, data(7), data(4), train_dataloader_kwargs=SHUFFLED, **resume)
        weights, losses = trainer.get_model().state_dict().values(), trainer.run_history.get_metric_values
        return [losses("train_loss_epoch"), losses("eval_loss_epoch"), *(weight.tolist() for weight in weights)]

    def whole_and_continued() -> list[list[Any]]:
        whole = trained(Save())
        return [whole, *(trained(resume_from=tmp_path / name) for name in ("inside", "epoch_1"))]

    for whole, *continued in on_two(whole_and_continued):
        assert continued == [whole, whole]


def test_on_another_number_of_processes_the_first_one_gets_the_losses_of_all() -> None:
    states = [{"last": loss, "total": 3 * loss, "count": 3} for loss in (1.0, 2.0)]
    one, other = LossTracker(), LossTracker()
    one.load_state_dict(loss_of_rank(states, 0, 1))
    other.load_state_dict(loss_of_rank(states, 1, 3))
    assert (one.total_loss, one.running_count, other.total_loss, other.running_count) == (9.0, 6, 0.0, 0)
    assert loss_of_rank(states, 1, 2) is states[1]
