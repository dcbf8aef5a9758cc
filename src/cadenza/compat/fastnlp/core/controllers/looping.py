"""A custom loop over the batches of an epoch. In the native run such an epoch is one step."""

from __future__ import annotations

from typing import Any

import torch

from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.controllers.stepping import BatchLoop, SteppingTrainer
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.loading.loaders import set_loader_epoch


def whole_epoch(trainer: SteppingTrainer, loop: BatchLoop) -> dict[str, Any]:
    """Run an epoch with the user's loop. An `EarlyStopException` in it ends the training."""
    run = trainer.running()
    adapted = AdaptedRun.of(run)
    set_loader_epoch(trainer.dataloader, trainer.cur_epoch_idx)
    try:
        loop.run(trainer, trainer.dataloader)
    except EarlyStopException as stop:
        adapted.take_stop(stop)
    loss = dict.get(run.outputs, "loss")
    return {"loss": torch.tensor(torch.nan) if loss is None else loss.detach()}
