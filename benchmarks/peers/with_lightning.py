"""Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import CosineAnnealingLR

from peers.job import Batch, Job, Peer


class Heard(Callback):
    """Listens to the end of each step."""

    def on_train_batch_end(self, *arguments: object, **keywords: object) -> None: ...


class Idle(Callback):
    """Listens to nothing."""


class Module(LightningModule):
    """The job as Lightning wants it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.model = job, job.model

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss: torch.Tensor = self.job.loss_fn(self.model(inputs), targets)
        if self.job.typical:
            self.log("train/loss", loss)
        if self.job.log:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("loss", self.job.loss_fn(self.model(inputs), targets), batch_size=len(inputs))

    def configure_optimizers(self) -> Any:
        optimizer = self.job.optimizer(self.model.parameters())
        if not self.job.typical:
            return optimizer
        schedule = CosineAnnealingLR(optimizer, self.job.epochs * len(self.job.batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Ready(list[Batch]):
    """Batches as they are: in a plain list each would be taken for a loader."""


def trainer_of(job: Job) -> Trainer:
    """Return a trainer with all switched off that can be."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    switched_off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {} if job.defaults else switched_off
    callbacks: list[Callback] = [*(Heard() for _ in range(job.heard)), *(Idle() for _ in range(job.idle))]
    if job.typical:
        settings = {"enable_checkpointing": False, "enable_model_summary": False, "gradient_clip_val": 1.0}
        settings["logger"] = CSVLogger(job.place)
        callbacks.append(EMAWeightAveraging(decay=0.999))
    if job.log:
        settings["log_every_n_steps"] = 1
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        default_root_dir=job.place,
        callbacks=callbacks,
        **settings,
    )


def train(job: Job) -> None:
    """Train."""
    trainer_of(job).fit(Module(job), Ready(job.batches) if isinstance(job.batches, list) else job.batches)


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    return trainer_of(job).validate(Module(job), Ready(job.batches), verbose=False)[0]["loss"]


PEERS = {"Lightning": Peer(train, evaluate)}
