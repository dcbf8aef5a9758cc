"""``fastNLP.core.controllers.loops.train_batch_loop``: an epoch of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cadenza.compat.fastnlp.core.controllers.loops.loop import Loop
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import apply_mapping, indices_of

_END = object()


class TrainBatchLoop(Loop):
    """The trainer's loop over the batches of an epoch.

    A subclass may override `run`, or call it. The trainer runs an unchanged `run` with the native loop, which can resume
    inside an epoch.

    Args:
        batch_step_fn: ``batch_step_fn(trainer, batch)`` does the step instead.
    """

    def __init__(self, batch_step_fn: Callable[[Any, Any], object] | None = None) -> None:
        if batch_step_fn is not None:
            vars(self)["batch_step_fn"] = batch_step_fn

    def run(self, trainer: Any, dataloader: Any) -> None:
        """Train on the batches of a loader, with the events of each batch, and evaluate where that is due."""
        batches = iter(dataloader)
        while True:
            trainer.on_fetch_data_begin()
            batch = next(batches, _END)
            indices = None if batch is _END else indices_of(batch, dataloader)
            trainer.on_fetch_data_end()
            if batch is _END:
                break
            try:
                self._train_on(trainer, batch, indices)
            except (EarlyStopException, KeyboardInterrupt):
                raise
            except BaseException as error:
                if indices is not None:
                    error.add_note(f"while training on the samples {indices}")
                raise
            trainer.step_evaluate()
        trainer.epoch_evaluate()
        trainer.batch_idx_in_epoch = 0

    @staticmethod
    def batch_step_fn(trainer: Any, batch: Any) -> None:
        """Do the step of a batch: forward, backward, and the update if ``accumulation_steps`` batches were added."""
        outputs = trainer.train_step(batch)
        trainer.backward(outputs)
        trainer.step()
        trainer.zero_grad()

    def _train_on(self, trainer: Any, loaded: Any, indices: list[int] | None) -> None:
        batch = trainer.move_data_to_device(apply_mapping(trainer.input_mapping, loaded))
        trainer.on_train_batch_begin(batch, indices)
        with trainer.get_no_sync_context():
            self.batch_step_fn(trainer, batch)
        trainer.global_forward_batches += 1
        trainer.batch_idx_in_epoch += 1
        trainer.check_batch_step_fn()
        trainer.on_train_batch_end()
