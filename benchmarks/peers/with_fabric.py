"""Lightning Fabric: a loop by hand around its model and optimizer."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from peers.job import Job, of_loops


def train(job: Job) -> None:
    """Train."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer(job.model.parameters()))
    loss_fn, accumulate = job.loss_fn, job.accumulate
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
