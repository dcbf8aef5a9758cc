"""pytorch-accelerated's Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

from peers.job import TYPICAL, Batch, Job, Peer


class Heard(TrainerCallback):
    """Listens to the end of each step."""

    def on_train_step_end(self, *arguments: object, **keywords: object) -> None: ...


class Idle(TrainerCallback):
    """Listens to nothing."""


class LogEachLoss(TrainerCallback):
    """Notes the loss of each step in the history."""

    def on_train_step_end(self, trainer: Trainer, batch_output: dict[str, Any], **keywords: object) -> None:
        trainer.run_history.update_metric("train_loss_step", batch_output["loss"].item())


class Ready(list[Batch]):
    """Batches with the attribute of a DataLoader that the trainer sets."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__(batches)
        self.batch_sampler = SimpleNamespace()


class ReadyTrainer(Trainer):
    """A trainer that takes batches as they are."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: object = None) -> Ready:
        return Ready(self.train_dataset)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: object = None) -> Ready:
        return Ready(self.eval_dataset)


def trainer_of(job: Job) -> ReadyTrainer:
    """Return a trainer with all switched off that can be."""
    optimizer = job.optimizer(job.model.parameters())
    # it accepts one instance per class, so each has a separate class
    kinds = [*[Heard] * job.heard, *[Idle] * job.idle]
    listeners = [type(f"{kind.__name__}{number}", (kind,), {})() for number, kind in enumerate(kinds)]
    if job.log:
        listeners.append(LogEachLoss())
    return ReadyTrainer(job.model, job.loss_fn, optimizer, callbacks=[*(DEFAULT_CALLBACKS if job.defaults else ()), *listeners])


def train(job: Job) -> None:
    """Train."""
    trainer_of(job).train(
        job.batches,
        num_epochs=job.epochs,
        per_device_batch_size=len(job.batches[0][0]),
        gradient_accumulation_steps=job.accumulate,
    )


def evaluate(job: Job) -> float:
    """Return the mean loss."""
    trainer = trainer_of(job)
    trainer.evaluate(job.batches, per_device_batch_size=len(job.batches[0][0]))
    loss: float = trainer.run_history.get_latest_metric("evaluation_loss")
    return loss


PEERS = {"pytorch-accelerated": Peer(train, evaluate, TYPICAL | {"iterable"})}  # its loop cannot clip gradients
