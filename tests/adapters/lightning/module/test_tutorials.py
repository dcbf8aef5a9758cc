"""Five LightningModules as tutorials write them: each trains unchanged, with the losses and weights of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cadenza import Run, Trainer
from cadenza.callbacks import Best, Checkpoint, ClipGradients, EarlyStopping, Ema
from cadenza.compat.lightning import predict, test, validate
from tests.adapters.lightning.home import CPU
from tests.adapters.lightning.module.home import at_home, lightning, native_run, rows, weights
from tests.adapters.lightning.module.test_manual import Gan

# -- image classification, with a LightningDataModule --------------------------------------------------


class Digits(lightning.LightningDataModule):  # type: ignore[misc]
    """The 8x8 images of scikit-learn."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        pytest.importorskip("sklearn", reason="scikit-learn has the images").datasets.load_digits()

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images[:480] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels[:480]))
        self.train_part, self.val_part = (torch.utils.data.Subset(data, range(*span)) for span in ((0, 320), (320, 480)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_part, self.hparams.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_part, 80)


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A small convolutional network."""

    def __init__(self, width: int = 8, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        hits = (logits.argmax(1) == labels).float().mean()
        self.log_dict({"val_loss": functional.cross_entropy(logits, labels), "val_acc": hits}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.rate, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# -- a language model ----------------------------------------------------------------------------------


class Alphabet(Dataset[torch.Tensor]):
    """Pieces of a text, as numbers of letters."""

    def __init__(self, length: int = 12) -> None:
        text = "the quick brown fox jumps over the lazy dog and runs into the dark wood " * 6
        self.tokens = torch.tensor([0 if one == " " else ord(one) - 96 for one in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index * self.length : (index + 1) * self.length + 1]


class LanguageModel(lightning.LightningModule):  # type: ignore[misc]
    """A transformer that predicts the next letter."""

    def __init__(self, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(27, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 27)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=self.device))
        logits = self.head(self.encoder(hidden, mask=self.mask, is_causal=True))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [one for one in self.parameters() if one.ndim > 1]
        others = [one for one in self.parameters() if one.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


# -- an autoencoder ------------------------------------------------------------------------------------


class Autoencoder(lightning.LightningModule):  # type: ignore[misc]
    """Two networks, with a plateau schedule; all four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"loss": self._shared(batch, "train")}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        codes: torch.Tensor = self.encoder(batch[0])
        return codes

    def _shared(self, batch: Any, stage: str) -> torch.Tensor:
        loss = functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log(f"{stage}_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


# -- several loaders -----------------------------------------------------------------------------------


class TwoSources(lightning.LightningModule):  # type: ignore[misc]
    """Labelled and unlabelled data in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        x, y = batch["labelled"]
        unlabelled, _ = batch["unlabelled"]
        loss: torch.Tensor = functional.mse_loss(self.net(x), y) + 0.1 * self.net(unlabelled).square().mean()
        self.log("train_loss", loss, batch_size=len(x))
        return loss

    def train_dataloader(self) -> Any:
        return {"labelled": DataLoader(rows(12), 4), "unlabelled": DataLoader(rows(40, seed=1), 8)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


TUTORIALS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "classification": (Classifier, Digits),
    "GAN": (Gan, lambda: DataLoader(rows(), 4)),
    "language model": (LanguageModel, lambda: DataLoader(Alphabet(), 8)),
    "autoencoder": (Autoencoder, lambda: (DataLoader(rows(40), 4), DataLoader(rows(20, seed=1), 5))),
    "several loaders": (TwoSources, lambda: None),
}


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_trains_unchanged(name: str) -> None:
    make, data = TUTORIALS[name]
    theirs = at_home(make, data(), max_epochs=4)
    ours, run = native_run(make, data(), max_epochs=4)
    assert torch.equal(weights(ours), weights(theirs))
    assert theirs.trainer.global_step == ours.trainer.global_step > 0
    assert run.progress.epoch == 4
    expected = {name: value.item() for name, value in theirs.trainer.callback_metrics.items()}
    found = {name: value.item() for name, value in ours.trainer.callback_metrics.items() if name in expected}
    assert found == pytest.approx(expected)


def _autoencoder(**arguments: Any) -> tuple[Any, Trainer]:
    make, data = TUTORIALS["autoencoder"]
    torch.manual_seed(1)
    module = make()
    return module, Trainer.from_lightning(module, data(), **CPU, **arguments)


def test_the_autoencoder_is_tested_and_predicts() -> None:
    module, trainer = _autoencoder(max_epochs=4)
    trainer.fit()
    [result] = validate(trainer)
    assert result["val_loss"] == pytest.approx(module.trainer.callback_metrics["val_loss"].item())
    [result] = test(trainer, DataLoader(rows(20, seed=1), 5))
    assert set(result) == {"test_loss"}
    codes = predict(trainer, DataLoader(rows(10), 4))
    assert [tuple(one.shape) for one in codes] == [(4, 2), (4, 2), (2, 2)]


def _guarded(directory: Path, **arguments: Any) -> tuple[Any, Run, Trainer]:
    callbacks = [
        ClipGradients(max_norm=0.5),
        Ema(decay=0.9),
        EarlyStopping("val_loss", "min", patience=2, min_delta=0.03),
        Checkpoint(every="7 steps", keep=Best("val_loss", mode="min")),
    ]
    module, trainer = _autoencoder(max_epochs=20, directory=directory, callbacks=callbacks, seed=1, **arguments)
    return module, trainer.fit(resume="auto"), trainer


def test_native_callbacks_stand_beside_the_module_and_resume_exactly(tmp_path: Path) -> None:
    whole, run, trainer = _guarded(tmp_path / "whole")
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert "val_loss" in run.why("stopped")
    [result] = validate(trainer, which="best")
    assert result["val_loss"] == pytest.approx(min(value for _, value in run.history["val_loss"]))

    _guarded(tmp_path / "parts", max_steps=24)
    again, resumed, _ = _guarded(tmp_path / "parts")
    assert resumed.progress.step == run.progress.step
    assert torch.equal(weights(again), weights(whole))
    assert resumed.history["val_loss"] == run.history["val_loss"]
