"""Steps and loops of the user's own, made of the trainer's parts; half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.fastnlp import EarlyStopException, Trainer
from cadenza.engine.session import session_of
from tests.compat.fastnlp.toy import Error, Raising, Scribe, Scripted, Toy, toy_trainer


def weights_of(trainer: Trainer) -> Tensor:
    return nn.utils.parameters_to_vector(trainer.model.parameters())


def own_step(trainer: Trainer, batch: Any) -> None:
    outputs = trainer.train_step(batch)
    trainer.backward(outputs)
    trainer.step()
    trainer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_a_batch_step_fn_of_the_trainers_parts_equals_the_trainers_step(accumulate: int) -> None:
    scribes, trainers = [], []
    for step in (None, own_step):
        scribes.append(Scribe())
        trainers.append(toy_trainer(20, scribes[-1], batch_step_fn=step, accumulation_steps=accumulate, n_epochs=2))
        trainers[-1].run()
    assert torch.allclose(weights_of(trainers[0]), weights_of(trainers[1]), atol=1e-7)
    assert scribes[0].seen == scribes[1].seen


def test_events_that_a_batch_step_fn_does_not_cause_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def idle(trainer: Trainer, batch: Any) -> None:
        """Train nothing."""

    trainer = toy_trainer(callbacks=Scribe("on_before_backward", "on_train_begin"), batch_step_fn=idle, n_batches=2)
    trainer.run()
    assert caplog.text.count("callbacks have hooks at on_before_backward, but batch_step_fn did not cause these events") == 1
    assert trainer.global_forward_batches == 2


class OwnLoop:
    """What the trainer does in an epoch."""

    def run(self, trainer: Trainer, dataloader: Any) -> None:
        batches = iter(dataloader)
        while True:
            trainer.on_fetch_data_begin()
            batch = next(batches, None)
            trainer.on_fetch_data_end()
            if batch is None:
                break
            trainer.on_train_batch_begin(batch, None)
            own_step(trainer, batch)
            trainer.global_forward_batches += 1
            trainer.batch_idx_in_epoch += 1
            trainer.on_train_batch_end()
            trainer.step_evaluate()
        trainer.epoch_evaluate()


@pytest.mark.parametrize("every", [-1, 2])
def test_a_custom_loop_may_run_an_epoch(every: int) -> None:
    scribes, trainers = [], []
    for loop in (None, OwnLoop()):
        scribes.append(Scribe())
        metrics = {"acc": Scripted(*range(9))}
        trainers.append(toy_trainer(20, scribes[-1], metrics, n_epochs=2, accumulation_steps=5, evaluate_every=every))
        if loop is not None:
            trainers[-1].train_batch_loop = loop  # type: ignore[assignment]  # any object with a method run works
        trainers[-1].run()
    assert scribes[0].seen == scribes[1].seen
    assert torch.allclose(weights_of(trainers[0]), weights_of(trainers[1]), atol=1e-7)


@pytest.mark.parametrize(("per_epoch", "n_batches", "ends"), [(3, -1, [3, 6]), (-1, 7, [5, 7]), (4, 6, [4, 6])])
def test_a_custom_loop_gets_the_batches_of_the_run_only(per_epoch: int, n_batches: int, ends: list[int]) -> None:
    scribe = Scribe("on_train_epoch_end")
    trainer = toy_trainer(20, scribe, n_epochs=2, n_batches=n_batches)
    trainer.train_batch_loop = OwnLoop()  # type: ignore[assignment]  # any object with a method run works
    trainer.run(num_train_batch_per_epoch=per_epoch)
    assert [batch for _, _, batch in scribe.at("on_train_epoch_end")] == ends


def test_a_stop_in_a_custom_loop_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    scribe = Scribe("on_exception", "on_train_end", "on_train_epoch_end")
    stop = Raising("on_train_batch_begin", 2, EarlyStopException())
    trainer = toy_trainer(20, [stop, scribe], n_epochs=2, batch_step_fn=own_step)
    with pytest.raises(TypeError, match="must have a method run"):
        trainer.train_batch_loop = 3  # type: ignore[assignment]  # wrong on purpose
    trainer.train_batch_loop = OwnLoop()  # type: ignore[assignment]  # as above
    assert "train_batch_loop must call it" in caplog.text
    trainer.run()
    assert scribe.seen == [("on_exception", 0, 2, 2), ("on_train_end", 0, 2, 2)]


def test_the_parts_of_a_step_need_a_training_in_progress() -> None:
    with pytest.raises(RuntimeError, match="no training is in progress"):
        toy_trainer().backward({"loss": torch.ones(())})
    with pytest.raises(RuntimeError, match="no training is in progress"):
        toy_trainer().run_evaluate()


def test_fp16_trains() -> None:
    trainer = toy_trainer(20, metrics={"e": Error()}, fp16=True, n_epochs=2)
    trainer.run()
    assert trainer.live is not None
    assert session_of(trainer.live).precision.name == "fp16"
    assert not torch.equal(weights_of(trainer), nn.utils.parameters_to_vector(Toy().parameters()))
