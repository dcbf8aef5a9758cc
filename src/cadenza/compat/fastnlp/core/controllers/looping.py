"""A custom loop over the batches of an epoch. In the native run such an epoch is one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from cadenza.compat.adapter.view import existing
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.controllers.first_and_last import Plan
from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.loading.loaders import Limited, set_loader_epoch
from cadenza.run import Run


def whole_epoch(of: Callable[[], SteppingTrainer | None], loader: Any, plan: Plan, run: Run, _: Any) -> dict[str, Any]:
    """Run an epoch with the user's loop. An `EarlyStopException` in it ends the training."""
    trainer, adapted = existing(of()), AdaptedRun.of(run)
    set_loader_epoch(loader, trainer.cur_epoch_idx)
    done, left = trainer.batch_idx_in_epoch, plan.batches_from(trainer.cur_epoch_idx)
    if left < plan.per_epoch:  # n_batches shortens the last epoch
        loader = Limited(loader, left)
    adapted.epoch_evaluated = adapted.epoch_evaluated and bool(done)
    try:
        trainer.train_batch_loop.run(trainer, _Rest(loader, done) if done else loader)
        if trainer.cur_epoch_idx + 1 == trainer.n_epochs:
            trainer.finish_window()
        if not adapted.epoch_evaluated:  # as in fastNLP 1.0.1, where loops do not
            trainer.epoch_evaluate()
    except EarlyStopException as stop:
        adapted.take_stop(stop)
    loss = dict.get(run.outputs, "loss")
    return {"loss": torch.tensor(torch.nan) if loss is None else loss.detach()}


class _Rest:
    """A loader that skips the completed batches of a resumed training by reading them again in order."""

    def __init__(self, loader: Any, done: int) -> None:
        self._loader, self._done = loader, done

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._done, None)

    def __len__(self) -> int:
        return len(self._loader) - self._done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
