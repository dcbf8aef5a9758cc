"""Lightning Fabric: a loop by hand around its model and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from peers.job import Job, of_loops


def train(job: Job) -> None:
    """Train."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer(job.model.parameters()))
    loss_fn, accumulate = job.loss_fn, job.accumulate
    if job.typical:
        train_typically(job, fabric, model, optimizer)
        return
    for _ in range(job.epochs):
        model.train()
        for number, (inputs, targets) in enumerate(job.batches, start=1):
            waits = number % accumulate != 0
            with fabric.no_backward_sync(model, enabled=waits):
                loss = loss_fn(model(inputs), targets)
                fabric.backward(loss / accumulate if accumulate > 1 else loss)
            if not waits:
                optimizer.step()
                optimizer.zero_grad()


def train_typically(job: Job, fabric: Fabric, model: Any, optimizer: Any) -> None:
    """Train with the usual set-up."""
    loader = fabric.setup_dataloaders(job.batches)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    schedule = CosineAnnealingLR(optimizer, job.epochs * len(loader))
    step = 0
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in (bar := tqdm(loader)):
            loss = job.loss_fn(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            step += 1
            if step % 50 == 0:
                bar.write(f"step {step}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}")


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    model, loss_fn, total, count = Fabric(accelerator="cpu", devices=1).setup(job.model), job.loss_fn, 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in job.batches:
            total += loss_fn(model(inputs), targets).item() * len(inputs)
            count += len(inputs)
    return total / count


PEERS = {"Fabric": of_loops(train, evaluate)}
