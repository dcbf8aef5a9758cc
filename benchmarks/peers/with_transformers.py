"""Hugging Face's Trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from peers.job import ADAMW_ONLY, WORKLOADS, Job, Peer


class Heard(TrainerCallback):
    """Listens to the end of each step."""

    def on_step_end(self, *arguments: object, **keywords: object) -> None: ...


class Idle(TrainerCallback):
    """Listens to nothing."""


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.loss_fn = job.model, job.loss_fn

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(inputs)
        return {"loss": self.loss_fn(logits, labels), "logits": logits}


class Average(TrainerCallback):
    """Keeps a moving average of the weights."""

    def on_train_begin(self, *arguments: object, model: nn.Module, **keywords: object) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def on_step_end(self, *arguments: object, model: nn.Module, **keywords: object) -> None:
        self.average.update_parameters(model)


class Ready(list[dict[str, torch.Tensor]]):
    """Batches with the attributes of a DataLoader that the trainer reads."""

    def __init__(self, job: Job) -> None:
        super().__init__({"inputs": inputs, "labels": targets} for inputs, targets in job.batches)
        self.batch_size = len(job.batches[0][0])
        self.dataset = range(self.batch_size * len(self))


class ReadyTrainer(Trainer):
    """A trainer that takes batches as they are."""

    ready: Ready

    def get_train_dataloader(self) -> Ready:
        return self.ready

    def get_eval_dataloader(self, eval_dataset: object = None) -> Ready:
        return self.ready


def trainer_of(job: Job) -> ReadyTrainer:
    """Return a trainer with all switched off that can be."""
    switched_off = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "logging_nan_inf_filter": False}
    settings: dict[str, Any] = {} if job.defaults else switched_off
    if job.log:
        settings["logging_steps"] = 1
    arguments = TrainingArguments(
        str(job.place),
        num_train_epochs=job.epochs,
        gradient_accumulation_steps=job.accumulate,
        per_device_train_batch_size=len(job.batches[0][0]),
        per_device_eval_batch_size=len(job.batches[0][0]),
        max_grad_norm=0.0,  # the others do not clip either
        prediction_loss_only=True,
        report_to="none",
        use_cpu=True,
        **settings,
    )
    model, optimizer = WithLoss(job), job.optimizer(job.model.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    listeners = [*(Heard() for _ in range(job.heard)), *(Idle() for _ in range(job.idle))]
    trainer = ReadyTrainer(model, arguments, optimizers=(optimizer, constant), callbacks=listeners)
    if not job.defaults:
        trainer.remove_callback(PrinterCallback)
    trainer.ready = Ready(job)
    return trainer


def train(job: Job) -> None:
    """Train."""
    if job.typical:
        train_typically(job)
    else:
        trainer_of(job).train()


def train_typically(job: Job, optim: str = "adamw_torch") -> None:
    """Train with the usual set-up."""
    arguments = TrainingArguments(
        str(job.place),
        num_train_epochs=job.epochs,
        per_device_train_batch_size=job.batches.batch_size,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        optim=optim,
    )

    def collated(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    Trainer(WithLoss(job), arguments, data_collator=collated, train_dataset=job.batches.dataset, callbacks=[Average()]).train()


def train_fused(job: Job) -> None:
    """Train with a fused optimizer, the default of the Trainer."""
    if job.typical:
        train_typically(job, "adamw_torch_fused")
    else:
        train(replace(job, optimizer=partial(job.optimizer, fused=True)))


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    return trainer_of(job).evaluate()["eval_loss"]


PEERS = {
    "HF Trainer": Peer(train, evaluate, frozenset({"iterable"})),
    "HF Trainer, fused": Peer(train_fused, evaluate, frozenset(WORKLOADS) - ADAMW_ONLY),
}
