"""Cadenza: the optimizer given as a function, which it may build fused, or as an instance."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, LearningRate, LogTraining
from cadenza.sinks import Console
from peers.job import Job, Peer


class Heard(Callback):
    """Listens to the end of each step."""

    def on_step_end(self, run: Run) -> None: ...


class Idle(Callback):
    """Is never called in these trainings."""

    def on_exception(self, run: Run, error: BaseException) -> None: ...


def cosine(optimizer: Optimizer, total: int) -> CosineAnnealingLR:
    """Return the schedule of the usual set-up, for all steps of the run."""
    return CosineAnnealingLR(optimizer, total)


def train(job: Job, *, instance: bool) -> None:
    """Train. Nothing is on by default; the output of other frameworks' defaults is in the list if defaults stay on."""
    callbacks: list[Callback] = [*(Heard() for _ in range(job.heard)), *(Idle() for _ in range(job.idle))]
    if job.typical:
        callbacks += [
            ClipGradients(1.0),
            Ema(0.999),
            LearningRate(cosine),
            LogTraining("50 steps"),
            Console("50 steps"),
        ]
    if job.defaults:
        callbacks += [LogTraining("1 step" if job.log else "50 steps"), Console("50 steps"), Checkpoint()]
    Trainer(
        job.model,
        job.optimizer(job.model.parameters()) if instance else job.optimizer,
        job.batches,
        supervised(job.loss_fn),
        max_epochs=job.epochs,
        accumulate=job.accumulate,
        directory=job.place / "run" if job.defaults else None,
        progress=job.defaults or job.typical,
        callbacks=callbacks,
        device="cpu",
    ).fit()


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    trainer = Trainer(
        job.model, job.optimizer, job.batches, supervised(job.loss_fn), max_epochs=1, device="cpu", progress=False
    )
    return trainer.evaluate(job.batches)["eval/loss"]


PEERS = {
    "Cadenza": Peer(partial(train, instance=False), evaluate),
    "Cadenza, optimizer instance": Peer(partial(train, instance=True), evaluate),
}
