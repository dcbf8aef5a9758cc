"""Accelerate: a loop by hand around its model and optimizer."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from peers.job import Job, of_loops


def train(job: Job) -> None:
    """Train."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    model, optimizer = accelerator.prepare(job.model, job.optimizer(job.model.parameters()))
    loss_fn = job.loss_fn
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in job.batches:
            with accelerator.accumulate(model):
                loss = loss_fn(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


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
