"""A custom loop over the batches of an epoch. In the native run such an epoch is one step."""

from __future__ import annotations

from typing import Any

import torch

from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.loading.loaders import set_loader_epoch


def whole_epoch(trainer: SteppingTrainer) -> dict[str, Any]:
    """Run an epoch with the user's loop. An `EarlyStopException` in it ends the training."""
    run = trainer.running()
    adapted = AdaptedRun.of(run)
    set_loader_epoch(trainer.dataloader, trainer.cur_epoch_idx)
    adapted.epoch_evaluated = False
    try:
        trainer.train_batch_loop.run(trainer, trainer.dataloader)
        if trainer.cur_epoch_idx + 1 == trainer.n_epochs:
            trainer.finish_window()
        if not adapted.epoch_evaluated:  # as in fastNLP 1.0.1, in which loops do not do so
            trainer.epoch_evaluate()
    except EarlyStopException as stop:
        adapted.take_stop(stop)
    loss = dict.get(run.outputs, "loss")
    return {"loss": torch.tensor(torch.nan) if loss is None else loss.detach()}
