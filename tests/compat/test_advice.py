"""The trainer of an adapter does not suggest arguments that only the native trainer has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza
import cadenza.compat.nemo as nemo
from cadenza import supervised
from cadenza.compat.accelerated import Trainer as AcceleratedTrainer
from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback
from cadenza.compat.fastnlp import Trainer as FastNLPTrainer

DATA = TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
NATIVE_ADVICE = ("could be fused", "TensorBatches", "Add Checkpoint(...)")


class Regression(nn.Linear):
    def train_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self(batch[0]), batch[1])}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Regression(1, 1)
    return model, torch.optim.Adam(model.parameters())


def in_a_native_trainer(folder: Path) -> None:
    trainer = cadenza.Trainer(
        *model_and_optimizer(),
        DataLoader(DATA),
        supervised(nn.functional.mse_loss),
        max_epochs=1,
        directory=folder,
        progress=False,
    )
    trainer.fit(resume="auto")


def in_accelerated(folder: Path) -> None:
    model, optimizer = model_and_optimizer()
    save = SaveTrainingStateCallback(str(folder), save_every_n_epochs=1)
    loader = {"num_workers": 0}
    for resume_from in (None, str(folder / "epoch_1")):
        trainer = AcceleratedTrainer(model, nn.MSELoss(), optimizer, callbacks=(save,))
        trainer.train(DATA, 2, train_dataloader_kwargs=loader, resume_from=resume_from)


def in_fastnlp(folder: Path) -> None:
    model, optimizer = model_and_optimizer()
    FastNLPTrainer(model, DataLoader(DATA), optimizer, n_epochs=1, progress_bar=None).run()


def in_nemo(folder: Path) -> None:
    factory = nemo.core.NeuralModuleFactory()
    data = nemo.tutorials.RealFunctionDataLayer(batch_size=4, n=8)
    model, loss = nemo.tutorials.TaylorNet(dim=2), nemo.tutorials.MSELoss()
    x, y = data()
    factory.train([loss(predictions=model(x=x), target=y)], optimizer="adam", optimization_params={"num_epochs": 1, "lr": 0.1})


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_the_native_trainer_says_what_its_arguments_could_do_better(
    shown: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    in_a_native_trainer(tmp_path)
    text = shown.text + capsys.readouterr().err
    assert all(advice in text for advice in NATIVE_ADVICE)


@pytest.mark.filterwarnings("ignore::UserWarning")  # fastNLP's: no progress bar
@pytest.mark.parametrize("train", [in_accelerated, in_fastnlp, in_nemo])
def test_the_trainer_of_an_adapter_does_not(
    train: Callable[[Path], None], shown: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(tmp_path)
    text = shown.text + capsys.readouterr().err
    assert not [advice for advice in NATIVE_ADVICE if advice in text]
