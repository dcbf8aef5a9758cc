"""Ignite: with its own trainer, and with an engine around a step that is written by hand."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EMAHandler, ProgressBar
from ignite.metrics import Loss
from torch.optim.lr_scheduler import CosineAnnealingLR

from peers.job import TYPICAL, Batch, Job, Peer


class Idle:
    """Listens to nothing; any object may attach itself."""

    def attach(self, engine: Engine) -> None: ...


def train(job: Job) -> None:
    """Train with the trainer that comes along."""
    optimizer = job.optimizer(job.model.parameters())
    lean: dict[str, Any] = {} if job.defaults else {"output_transform": lambda x, y, y_pred, loss: None}
    trainer = create_supervised_trainer(job.model, optimizer, job.loss_fn, gradient_accumulation_steps=job.accumulate, **lean)
    if job.log:
        ProgressBar(persist=True).attach(trainer, output_transform=lambda loss: {"loss": loss})
    run(trainer, job)


def train_own_step(job: Job) -> None:
    """Train with a user-written step."""
    model, loss_fn, optimizer = job.model, job.loss_fn, job.optimizer(job.model.parameters())

    def step(engine: Engine, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    model.train()
    if job.typical:
        train_typically(job, optimizer)
        return
    run(Engine(step), job)


def train_typically(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Train with the usual set-up."""
    model, loss_fn = job.model, job.loss_fn
    schedule = CosineAnnealingLR(optimizer, job.epochs * len(job.batches))

    def step(engine: Engine, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    trainer = Engine(step)
    EMAHandler(model, momentum=0.001).attach(trainer)
    bar = ProgressBar(persist=True)
    bar.attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(every=50))
    def log(engine: Engine) -> None:
        rate = schedule.get_last_lr()[0]
        bar.log_message(f"step {engine.state.iteration}  loss {engine.state.output.item():.4f}  lr {rate:.2e}")

    trainer.run(job.batches, max_epochs=job.epochs)


def run(trainer: Engine, job: Job) -> None:
    """Attach the listeners and run."""
    for _ in range(job.heard):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)
    for _ in range(job.idle):
        Idle().attach(trainer)
    trainer.run(job.batches, max_epochs=job.epochs)


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    evaluator = create_supervised_evaluator(job.model, metrics={"loss": Loss(job.loss_fn)})
    loss: float = evaluator.run(job.batches).metrics["loss"]
    return loss


PEERS = {
    "Ignite": Peer(train, evaluate, TYPICAL),  # it cannot clip gradients
    "Ignite, own step": Peer(train_own_step, evaluate, frozenset({"accumulate_4", "evaluation", "defaults", "log"})),
}
