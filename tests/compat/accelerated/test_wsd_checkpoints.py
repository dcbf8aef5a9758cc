"""Checkpoints before and after each decay of a WSD schedule, and trainings that begin or continue there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback, WSDCheckpointCallback
from cadenza.compat.accelerated.schedulers import WSDLrScheduler
from cadenza.compat.accelerated.trainer import Trainer
from tests.compat.accelerated.parts import data, train, trainer_of
from tests.compat.accelerated.test_history import Rates
from tests.compat.accelerated.test_two_processes import on_two

QUARTER = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25)
AGAIN = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25, is_continuation_from_checkpoint=True)


class Weights(TrainerCallback):
    """Records the weight before each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen.append(trainer.get_model().state_dict()["weight"].item())


def trained(epochs: int, *callbacks: TrainerCallback, batches: int = 5, create: Any = QUARTER, **more: Any) -> Trainer:
    trainer = trainer_of(callbacks=callbacks, lr=0.01)
    train(trainer, epochs, data(batches), create_scheduler_fn=create, **more)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_state_is_saved_before_the_decay_and_a_file_after_it(accumulate: int, tmp_path: Path) -> None:
    weights = Weights()
    trainer = trained(
        4, WSDCheckpointCallback(tmp_path), weights, gradient_accumulation_steps=accumulate, batches=5 * accumulate
    )
    assert names(tmp_path) == ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"]
    content = torch.load(tmp_path / "checkpoint_20_wsd_post_decay.pt")
    facts = {name: content[name] for name in ("step", "checkpoint_type", "total_steps", "decay_fraction")}
    assert facts == {"step": 20, "checkpoint_type": "wsd_post_decay", "total_steps": 20, "decay_fraction": 0.25}
    assert content["model_state_dict"]["weight"] == trainer.model.state_dict()["weight"]
    assert content["scheduler_state_dict"]["num_updates"] == 19
    assert "optimizer_state_dict" in content
    fresh = trained(1)
    saved = fresh.load_training_state(tmp_path / "checkpoint_15_wsd_pre_decay")
    assert (saved["step"], saved["checkpoint_type"], saved["decay_fraction"]) == (15, "wsd_pre_decay", 0.25)
    assert fresh.model.state_dict()["weight"].item() == weights.seen[15 * accumulate]  # after 15 updates
    assert fresh.scheduler.get_current_step() == 14


def test_each_of_several_decays_has_its_checkpoints(tmp_path: Path) -> None:
    create = WSDLrScheduler.create_scheduler_fn(num_checkpoints=3)
    save = WSDCheckpointCallback(tmp_path, save_optimizer=False, save_scheduler=False)
    trained(4, save, batches=20, create=create)
    steps = {"pre": (18, 38, 76), "post": (20, 40, 80)}
    expected = [
        f"checkpoint_{step}_wsd_{kind}_decay" + (".pt" if kind == "post" else "") for kind in steps for step in steps[kind]
    ]
    assert names(tmp_path) == sorted(expected)
    assert save.checkpoint_steps == {20, 40, 80}
    content = torch.load(tmp_path / "checkpoint_40_wsd_post_decay.pt")
    assert not {"optimizer_state_dict", "scheduler_state_dict"} & content.keys()


def test_a_decay_may_take_the_whole_training(tmp_path: Path) -> None:
    whole, again = Weights(), Weights()
    create = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=1.0)
    trained(1, WSDCheckpointCallback(tmp_path), whole, create=create)
    assert names(tmp_path) == ["checkpoint_0_wsd_pre_decay", "checkpoint_5_wsd_post_decay.pt"]
    trained(1, WSDCheckpointCallback(tmp_path), again, create=create, resume_from=tmp_path / "checkpoint_0_wsd_pre_decay")
    assert again.seen == whole.seen


@pytest.mark.parametrize("name", ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"])
def test_a_new_training_begins_at_a_checkpoint_with_a_stable_phase(name: str, tmp_path: Path) -> None:
    first = Weights()
    trained(4, WSDCheckpointCallback(tmp_path / "first"), first)
    save, rates, weights = (
        WSDCheckpointCallback(tmp_path / "then", initial_checkpoint=tmp_path / "first" / name),
        Rates(),
        Weights(),
    )
    trainer = trained(4, save, rates, weights, create=AGAIN)
    end = torch.load(tmp_path / "first" / "checkpoint_20_wsd_post_decay.pt")["model_state_dict"]["weight"].item()
    assert weights.seen[0] == (first.seen[15] if name.endswith("pre_decay") else end)
    assert rates.seen[1:16] == [0.01] * 15
    assert rates.seen[17] < 0.01
    assert names(tmp_path / "then") == ["checkpoint_15_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt"]
    assert trainer.run_history.current_epoch == 5
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4


def test_without_the_argument_the_schedule_continues_inside_the_decay(tmp_path: Path) -> None:
    whole = Rates()
    trained(4, WSDCheckpointCallback(tmp_path), whole)
    rest = Rates()
    save = WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / "checkpoint_15_wsd_pre_decay")
    trained(1, save, rest)
    assert rest.seen == whole.seen[15:]
    assert save.last_checkpoint_step == 20


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    trained(4, WSDCheckpointCallback(tmp_path))
    trained(4, WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / "checkpoint_15_wsd_pre_decay"), create=AGAIN)
    folder = tmp_path / "checkpoint_15_wsd_pre_decay"
    assert len(names(folder)) == 1
    assert trained(1, create=AGAIN).load_training_state(folder)["step"] == 15


@pytest.mark.parametrize("name", ["step_7", "step_17"])
@pytest.mark.parametrize("create", [QUARTER, AGAIN])
def test_a_training_that_was_killed_resumes_inside_a_phase(name: str, create: Any, tmp_path: Path) -> None:
    trained(4, WSDCheckpointCallback(tmp_path / "start"))
    first = tmp_path / "start" / "checkpoint_15_wsd_pre_decay"

    def once(folder: str, *more: TrainerCallback, **arguments: Any) -> tuple[list[float], Any]:
        rates = Rates()
        save = WSDCheckpointCallback(tmp_path / folder, initial_checkpoint=None if create is QUARTER else first)
        trainer = trained(4, save, rates, *more, create=create, **arguments)
        return rates.seen, [trainer.model.state_dict()["weight"].item(), trainer.scheduler.state_dict(), save.state_dict()]

    rates, whole = once("whole", SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1))
    rest, continued = once("rest", resume_from=tmp_path / "states" / name)
    assert continued == whole
    assert rest == rates[-len(rest) :]
    missing = {"checkpoint_15_wsd_pre_decay"} if name == "step_17" else set()
    assert set(names(tmp_path / "rest")) == set(names(tmp_path / "whole")) - missing


def test_a_scheduler_without_checkpoints_is_an_error_and_a_missing_file_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ValueError, match=r"needs a scheduler with get_checkpoint_steps; got NoneType\. Use create_scheduler_fn"
    ):
        trained(1, WSDCheckpointCallback(tmp_path), create=None)
    trained(1, WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / "nowhere"))
    assert "nowhere' does not exist, so the training starts without it" in caplog.text


def test_two_processes_save_once_and_resume_inside_the_decay(tmp_path: Path) -> None:
    def both() -> tuple[list[float], list[float], bool]:
        create = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.5)
        whole = trained(2, WSDCheckpointCallback(tmp_path / "whole"), batches=8, create=create)
        rates = Rates()
        folder = tmp_path / "whole" / "checkpoint_4_wsd_pre_decay"
        rest = trained(2, WSDCheckpointCallback(tmp_path / "rest"), rates, batches=8, create=create, resume_from=folder)
        then, anew = Rates(), WSDCheckpointCallback(tmp_path / "then", initial_checkpoint=folder)
        trained(2, anew, then, batches=8, create=AGAIN)
        return rates.seen, then.seen[:6], torch.equal(whole.model.state_dict()["weight"], rest.model.state_dict()["weight"])

    for rates, then, equal in on_two(both):
        assert equal
        assert rates == pytest.approx([0.01, 0.01, 0.005000005, 0.002928939])
        assert then == [0.01] * 6
    assert names(tmp_path / "then") == ["checkpoint_4_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt"]
