"""A run with dropout, a shuffled loader, a schedule and momentum, which acts change; and a digest of where it ends."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining
from cadenza.loading import TensorBatches
from cadenza.steering import Steering


class Pace(Callback):
    """Steps that take some time, and a function that is called in one of them."""

    def __init__(self, pace_s: float, at_step: tuple[int, Callable[[], object]] | None) -> None:
        self.pace_s, self.at_step = pace_s, at_step

    def on_step_end(self, run: Run) -> None:
        time.sleep(self.pace_s)
        if self.at_step is not None and run.progress.step == self.at_step[0]:
            self.at_step[1]()


def train(
    directory: Path,
    steps: int,
    *,
    acts: Path | None = None,
    pace_s: float | None = None,
    at_step: tuple[int, Callable[[], object]] | None = None,
) -> Run:
    """Train so many steps; continue the run in the directory, if there is one."""
    draw = torch.Generator().manual_seed(3)
    data = TensorBatches(torch.randn(64, 8, generator=draw), torch.randn(64, 1, generator=draw), batch_size=4, shuffle=True)
    pace = float(os.environ.get("PACE_S", "0")) if pace_s is None else pace_s
    callbacks = [
        LogTraining("1 step", throughput=False),
        Evaluate(data, "100 steps"),
        Checkpoint("7 steps", keep_last=3),
        Pace(pace, at_step),
        LearningRate(lambda optimizer: StepLR(optimizer, 40, gamma=0.9)),
        Steering(acts=acts),
    ]
    return Trainer(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.8),
        data, supervised(nn.MSELoss()), max_steps=steps, seed=7, directory=directory, callbacks=callbacks, progress=False,
    ).fit(resume="auto")  # fmt: skip


def digest_of(run: Run) -> str:
    """Return a digest of the counters, the weights and the state of the optimizer."""
    optimizer = run.optimizers[0]
    momenta = [optimizer.state[one]["momentum_buffer"] for group in optimizer.param_groups for one in group["params"]]
    tensors = [*run.model.state_dict().values(), *momenta]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    facts = repr([run.progress.step, run.progress.batch, settings]).encode()
    return hashlib.sha256(facts + b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()
