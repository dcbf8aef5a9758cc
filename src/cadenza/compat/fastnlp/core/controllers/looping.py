"""A loop of the user's own over the batches of an epoch. Natively such an epoch is one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.session import Session
from cadenza.loading.batches import announce_epoch

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.trainer import Trainer


class BatchLoop(Protocol):
    """What ``trainer.train_batch_loop`` must be.

    It does what the trainer does in an epoch: it calls the events, such as ``trainer.on_train_batch_begin(batch, indices)``,
    makes the steps of ``trainer.train_step``, ``backward``, ``step`` and ``zero_grad``, raises
    ``trainer.batch_idx_in_epoch`` and ``trainer.global_forward_batches``, and calls ``trainer.step_evaluate()`` after a batch
    and ``trainer.epoch_evaluate()`` at the end.
    """

    def run(self, trainer: Any, dataloader: Any) -> object:
        """Train on the batches of an epoch."""


def whole_epoch(trainer: Trainer, loop: BatchLoop) -> dict[str, Any]:
    """Have the user's loop do an epoch; an `EarlyStopException` in it ends the training."""
    run = trainer.running()
    session = Session.of(run)
    announce_epoch(trainer.dataloader, trainer.cur_epoch_idx)
    try:
        loop.run(trainer, trainer.dataloader)
    except EarlyStopException as stop:
        session.take_stop(stop)
    loss = dict.get(run.outputs, "loss")
    return {"loss": torch.tensor(torch.nan) if loss is None else loss.detach()}
