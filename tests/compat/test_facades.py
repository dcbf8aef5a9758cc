"""In the trainers of the adapters, callbacks of Hugging Face, Lightning and Keras run, and no advice names what they lack."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Trainer, supervised
from cadenza.compat.accelerated import Trainer as AcceleratedTrainer
from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback
from cadenza.compat.fastnlp import Trainer as FastNLPTrainer
from cadenza.compat.nemo10.core import NeuralModuleFactory
from tests.compat.accelerated.parts import HERE, data
from tests.compat.nemo.graphs import line, train

lightning = pytest.importorskip("lightning", reason="one of the three systems is Lightning: pip install lightning")
transformers = pytest.importorskip("transformers", reason="one of the three is transformers: pip install transformers")
keras = pytest.importorskip("keras", reason="one of the three is Keras: pip install keras")

EPOCHS, STEPS = 2, 5


class Counts:
    """Counts steps and epochs, and stops after some steps."""

    def __init__(self, stop_after: int = 99) -> None:
        self.steps, self.epochs, self.begun, self.ended, self.stop_after = 0, 0, 0, 0, stop_after
        self.losses: list[float] = []

    def step(self, loss: Any = None) -> bool:
        self.steps += 1
        if loss is not None:
            self.losses.append(round(float(loss), 6))
        return self.steps == self.stop_after

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.begun, self.steps, self.epochs, self.ended


class OfTransformers(Counts, transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert isinstance(kwargs["model"], nn.Module)
        self.begun += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.step():
            control.should_training_stop = True
        assert state.global_step == self.steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended += 1


class OfLightning(Counts, lightning.Callback):  # type: ignore[name-defined, misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert list(pl_module.parameters())
        self.begun += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.step(outputs["loss"]):
            trainer.should_stop = True
        assert trainer.global_step == self.steps

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended += 1


class OfKeras(Counts, keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    def __init__(self, stop_after: int = 99) -> None:
        keras.callbacks.Callback.__init__(self)
        Counts.__init__(self, stop_after)

    def on_train_begin(self, logs: Any = None) -> None:
        assert self.model.count_params() > 0
        self.begun += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.step(logs["loss"]):
            self.model.stop_training = True
        assert batch == (self.steps - 1) % STEPS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert epoch == self.epochs
        self.epochs += 1

    def on_train_end(self, logs: Any = None) -> None:
        self.ended += 1


class Regression(nn.Linear):
    def train_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self(batch[0]), batch[1])}


def in_accelerated(callbacks: list[Any], resume_from: str | None = None) -> None:
    model = Regression(1, 1)
    trainer = AcceleratedTrainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), callbacks=callbacks)
    trainer.train(data(STEPS), EPOCHS, per_device_batch_size=2, train_dataloader_kwargs=HERE, resume_from=resume_from)


def in_fastnlp(callbacks: list[Any]) -> None:
    model = Regression(1, 1)
    optimizer, batches = torch.optim.Adam(model.parameters()), DataLoader(data(STEPS), 2)
    FastNLPTrainer(model, batches, optimizer, n_epochs=EPOCHS, callbacks=callbacks, progress_bar=None).run()


def in_nemo(callbacks: list[Any]) -> None:
    train(line(loader=DataLoader(data(STEPS), 2)), *callbacks, optimizer="adam", num_epochs=EPOCHS)


def in_nemo10(callbacks: list[Any]) -> None:
    graph = line(loader=DataLoader(data(STEPS), 2))
    train(graph, *callbacks, factory=NeuralModuleFactory(), optimizer="adam", num_epochs=EPOCHS)


KINDS = [OfTransformers, OfLightning, OfKeras]
IN_FACADES = pytest.mark.parametrize("train", [in_accelerated, in_fastnlp, in_nemo, in_nemo10])
pytestmark = pytest.mark.filterwarnings("ignore:.*progress_bar:UserWarning")  # fastNLP's


@IN_FACADES
def test_all_three_count_the_same_steps_and_epochs(train: Callable[[list[Any]], None]) -> None:
    callbacks = [kind() for kind in KINDS]
    train(callbacks)
    assert [one.counts for one in callbacks] == [(1, EPOCHS * STEPS, EPOCHS, 1)] * 3
    assert len(callbacks[1].losses) == EPOCHS * STEPS
    assert callbacks[1].losses[0] == callbacks[2].losses[0]  # of Keras, means of the epoch until now


@pytest.mark.parametrize("kind", KINDS)
@IN_FACADES
def test_each_may_stop_the_training(train: Callable[[list[Any]], None], kind: Any) -> None:
    stops, sees = kind(stop_after=STEPS + 2), OfLightning()
    train([stops, sees])
    assert sees.steps == stops.steps
    assert stops.steps in (STEPS + 2, 2 * STEPS)  # Keras and Lightning end the epoch where a facade stops at its end
    assert stops.ended == 1


@pytest.mark.parametrize("kind", KINDS)
@IN_FACADES
def test_one_instance_twice_is_refused(train: Callable[[list[Any]], None], kind: Any) -> None:
    one = kind()
    with pytest.raises((TypeError, ValueError), match=f"in the list twice: {kind.__name__}"):
        train([one, one])


NATIVE_ADVICE = ("could be fused", "Add Checkpoint(...)")


def test_the_native_trainer_says_what_its_arguments_could_do_better(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    model = Regression(1, 1)
    optimizer, loss = torch.optim.Adam(model.parameters()), supervised(nn.functional.mse_loss)
    trainer = Trainer(model, optimizer, DataLoader(data(STEPS), 2), loss, max_epochs=1, directory=tmp_path, progress=False)
    trainer.fit(resume="auto")
    text = caplog.text + capsys.readouterr().err
    assert all(advice in text for advice in NATIVE_ADVICE)


@IN_FACADES
def test_the_trainer_of_an_adapter_does_not(
    train: Callable[..., None], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    train([])
    if train is in_accelerated:
        train([SaveTrainingStateCallback(str(tmp_path), save_every_n_epochs=1)])
        train([], resume_from=str(tmp_path / "epoch_1"))
    text = caplog.text + capsys.readouterr().err
    assert not [advice for advice in NATIVE_ADVICE if advice in text]
