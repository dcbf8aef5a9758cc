"""Callbacks of other systems in the list of a trainer pass a strict type checker, with stubs and without."""

from typing import Any

import keras
import lightning
import pytorch_lightning as pl
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from torch import Tensor, nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint
from cadenza.testing import check_callback, simulate, tiny_run


class OfLightning(lightning.Callback):
    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None: ...


class OfPytorchLightning(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None: ...


class OfTransformers(transformers.TrainerCallback):
    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None: ...


class OfKeras(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types for mypy
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None: ...


def trained(model: nn.Module, loader: list[tuple[Tensor, Tensor]], given: OfLightning) -> Trainer:
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        loader,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=1,
        callbacks=[
            given,
            OfLightning(),
            OfPytorchLightning(),
            OfTransformers(),
            OfKeras(),
            LightningEarlyStopping("val_loss"),
            transformers.EarlyStoppingCallback(),
            keras.callbacks.EarlyStopping("val_loss"),
            Checkpoint(),
        ],
    )
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, max_steps=1, callbacks=(OfKeras(), Checkpoint()))
    same_kind = [OfLightning(), OfLightning()]
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, max_steps=1, callbacks=same_kind)
    other_kind = [OfTransformers(), transformers.PrinterCallback()]
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, max_steps=1, callbacks=other_kind)
    check_callback(OfLightning)
    simulate([OfTransformers()], metrics={"eval/loss": [1.0]})
    tiny_run(callbacks=[OfKeras(), given])
    return trainer
