"""Manual optimization, and modules as tutorials write them: GANs and others that call their optimizers themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Run, Trainer
from cadenza.callbacks import Best, Checkpoint, ClipGradients, EarlyStopping, Ema
from cadenza.compat.lightning import predict, test, validate
from cadenza.errors import AdapterError
from cadenza.testing import launch
from tests.adapters.lightning.home import CPU
from tests.adapters.lightning.module.home import (
    Regression,
    at_home,
    batches,
    lightning,
    native,
    native_run,
    rows,
    trained_alike,
    weights,
)
from tests.adapters.lightning.module.test_trainer_in_steps import Unfreezes

# -- manual optimization -----------------------------------------------------------------------------------


class Gan(lightning.LightningModule):  # type: ignore[misc]
    """Draws points like those of the data. One network makes them, the other tells them from real ones."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[tuple[float, float]] = []
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        make, judge = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(make)
        assert not any(one.requires_grad for one in self.discriminator.parameters())
        fooled = self.against(self.generator(self.noise(batch_idx, len(real))), ones)
        make.zero_grad()
        self.manual_backward(fooled)
        self.clip_gradients(make, gradient_clip_val=0.5)
        make.step()
        self.untoggle_optimizer(make)

        with judge.toggle_model():
            made = self.generator(self.noise(batch_idx, len(real))).detach()
            told = (self.against(real, ones) + self.against(made, zeros)) / 2
            judge.zero_grad()
            self.manual_backward(told)
            judge.step()
        self.losses.append((fooled.item(), told.item()))

    def noise(self, batch_idx: int, count: int) -> torch.Tensor:
        return torch.randn(count, 2, generator=torch.Generator().manual_seed(batch_idx))

    def against(self, points: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.discriminator(points), target)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(f"step {self.trainer.global_step} {self.trainer.current_epoch}")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.calls.append(f"backward {loss.item():.4f}")

    def on_after_backward(self) -> None:
        self.calls.append("after")

    def on_train_epoch_end(self) -> None:
        for one in self.lr_schedulers():
            one.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"end {batch_idx} {self.trainer.global_step} {outputs.get('loss')}")

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam(self.generator.parameters(), self.hparams.rate)
        judge = torch.optim.SGD(self.discriminator.parameters(), self.hparams.rate, momentum=0.9)
        return [make, judge], [StepLR(make, 1, 0.5), {"scheduler": StepLR(judge, 1, 0.9), "interval": "epoch"}]


def test_a_gan_trains_as_in_lightning_with_the_same_calls_of_hooks() -> None:
    theirs, ours, run = trained_alike(Gan, max_epochs=2)
    assert len(ours.losses) == 20
    assert ours.calls == theirs.calls
    assert ours.trainer.global_step == theirs.trainer.global_step == 40
    assert run.loss is not None
    assert run.loss.item() == pytest.approx(sum(ours.losses[-1]))  # of all backward passes of the step


class Accumulating(Regression):
    """Updates after every third batch, keeps its gradients in between, and closes over a second backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, (x, y) = self.optimizers(), batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.manual_backward(loss / 3, retain_graph=True)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        return {"loss": loss, "rows": len(x)}


@pytest.mark.parametrize(("make", "steps", "updates"), [(Gan, 7, 14), (Accumulating, 4, 1)])
def test_a_run_that_continues_in_mid_epoch_ends_with_the_same_bits(
    make: type[Any], steps: int, updates: int, tmp_path: Path
) -> None:
    whole = native(make, batches(), max_epochs=2, seed=1)
    save: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint(every=f"{steps} steps")], "seed": 1}
    first, run = native_run(make, batches(), max_steps=steps, **save)
    assert (run.progress.step, first.trainer.global_step) == (steps, updates)
    again, run = native_run(make, batches(), resume="auto", max_epochs=2, **save)
    assert (run.progress.step, again.trainer.global_step) == (20, whole.trainer.global_step)
    assert torch.equal(weights(again), weights(whole))
    assert again.losses == whole.losses[steps:]


# -- other uses ----------------------------------------------------------------------------------------


class WithClosure(Regression):
    """Gives the optimizer a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, (x, y) = self.optimizers(), batch

        def closure() -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("make", [Accumulating, WithClosure])
def test_gradients_stay_between_batches_and_closures_are_called(make: type[Any]) -> None:
    trained_alike(make, max_epochs=2)


def test_what_belongs_to_automatic_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate=1"):
        Trainer.from_lightning(Gan(), batches(), max_epochs=1, accumulate=2, device="cpu")

    class Confused(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))

    for fit in (at_home, native):
        with pytest.raises(Exception, match="automatic_optimization` as False"):
            fit(Confused, batches(), max_epochs=1)


# -- two processes -------------------------------------------------------------------------------------


class WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Contrastive(Regression):
    """Compares its embeddings with those of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = nn.functional.normalize(self.net[:2](batch[0]), dim=1)
        every = self.all_gather(own, sync_grads=True)
        assert not self.trainer.strategy.all_gather(own).requires_grad or self.trainer.world_size == 1
        every = every.flatten(0, 1) if self.trainer.world_size > 1 else every
        return torch.logsumexp(every @ every.T, 1).mean() + 0 * self.net[2](own).sum()


def test_two_processes_train_as_one_with_the_whole_batch() -> None:
    def fits() -> list[Any]:
        torch.set_num_threads(1)
        found = list[Any]()
        for make in (Regression, Gan, Contrastive, Unfreezes):
            module, run = native_run(make, batches(40, 4), max_epochs=1)
            found.append((weights(module), run.progress.step, module.trainer.global_step, type(run.driver).__name__))
        split = [native(WithAdam, batches(40, 4), max_epochs=1, driver=driver).losses for driver in ("ddp", "fsdp")]
        with pytest.raises(AdapterError, match="manual optimization, which works with one process and with DDP"):
            native(Gan, batches(40, 4), max_epochs=1, driver="fsdp")
        return [found, split]

    (first, split), (second, _) = launch(fits)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert [one[1:] for one in first] == [(5, 5, "DdpDriver"), (5, 10, "DdpDriver"), *[(5, 5, "DdpDriver")] * 2]
    assert split[1] == pytest.approx(split[0], rel=1e-5)
    for index, make in ((0, Regression), (2, Contrastive), (3, Unfreezes)):
        alone = native(make, batches(40, 8), max_epochs=1)
        torch.testing.assert_close(first[index][0], weights(alone))


# -- tutorials ---------------------------------------------------------------------------------------------


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


# -- an autoencoder ------------------------------------------------------------------------------------


class Autoencoder(lightning.LightningModule):  # type: ignore[misc]
    """Two networks, with a plateau schedule; all four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
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


TUTORIALS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "classification": (Classifier, Digits),
    "autoencoder": (Autoencoder, lambda: (DataLoader(rows(40), 4), DataLoader(rows(20, seed=1), 5))),
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
