"""The loop that people write."""

from __future__ import annotations

import torch

from peers.job import Job, of_loops


def train(job: Job) -> None:
    """Train."""
    model, loss_fn, optimizer = job.model, job.loss_fn, job.optimizer(job.model.parameters())
    if job.accumulate > 1:
        accumulating(job, optimizer)
        return
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in job.batches:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()


def accumulating(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Train with several batches in a step."""
    model, loss_fn, accumulate = job.model, job.loss_fn, job.accumulate
    for _ in range(job.epochs):
        model.train()
        for number, (inputs, targets) in enumerate(job.batches, start=1):
            loss = loss_fn(model(inputs), targets)
            (loss / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    model, loss_fn, total, count = job.model, job.loss_fn, 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in job.batches:
            total += loss_fn(model(inputs), targets).item() * len(inputs)
            count += len(inputs)
    model.train()
    return total / count


PEERS = {"by hand": of_loops(train, evaluate)}
