"""Accelerate: a loop by hand around its model and optimizer."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from peers.job import Job, of_loops


def train(job: Job) -> None:
    """Train."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    model, optimizer = accelerator.prepare(job.model, job.optimizer(job.model.parameters()))
    loss_fn = job.loss_fn
    if job.typical:
        train_typically(job, accelerator, model, optimizer)
        return
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in job.batches:
            with accelerator.accumulate(model):
                loss = loss_fn(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def train_typically(job: Job, accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Train with the usual set-up."""
    loader = accelerator.prepare(job.batches)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    schedule = accelerator.prepare(CosineAnnealingLR(optimizer, job.epochs * len(loader)))
    step = 0
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in (bar := tqdm(loader)):
            with accelerator.accumulate(model):
                loss = job.loss_fn(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            average.update_parameters(model)
            step += 1
            if step % 50 == 0:
                bar.write(f"step {step}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}")


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    accelerator = Accelerator(cpu=True)
    model, loss_fn, total, count = accelerator.prepare(job.model), job.loss_fn, 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in job.batches:
            loss = accelerator.gather(loss_fn(model(inputs), targets))
            total += loss.item() * len(inputs)
            count += len(inputs)
    return total / count


PEERS = {"accelerate": of_loops(train, evaluate)}
