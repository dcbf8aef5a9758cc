"""The loop that people write, with the optimizer as torch makes it, and with a fused one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from peers.job import ADAMW_ONLY, CALLBACKS, WORKLOADS, Job, Peer


def train(job: Job) -> None:
    """Train."""
    model, loss_fn, optimizer = job.model, job.loss_fn, job.optimizer(job.model.parameters())
    if job.typical:
        train_typically(job, optimizer)
        return
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


def train_typically(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Train with the usual set-up."""
    model, loss_fn, step = job.model, job.loss_fn, 0
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.epochs * len(job.batches))
    for _ in range(job.epochs):
        model.train()
        for inputs, targets in (bar := tqdm(job.batches)):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            step += 1
            if step % 50 == 0:
                bar.write(f"step {step}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}")


def fused(job: Job) -> None:
    """Train with a fused optimizer."""
    train(replace(job, optimizer=partial(job.optimizer, fused=True)))


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


PEERS = {
    "by hand": Peer(train, evaluate, CALLBACKS),
    "by hand, again": Peer(train, evaluate, CALLBACKS),  # the noise of the machine and the measurement
    "by hand, fused": Peer(fused, evaluate, frozenset(WORKLOADS) - ADAMW_ONLY),
}
