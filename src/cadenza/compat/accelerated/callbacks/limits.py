"""Use fewer batches, and evaluate more often."""

from __future__ import annotations

from typing import Any

from cadenza.callbacks.limit import Limit
from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.compat.accelerated.events import is_intermediate
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.loading.evaluation import Evaluation
from cadenza.run import Run


class LimitBatchesCallback(TrainerCallback):
    """Use only the first batches of each loader, with the native `Limit`. `LimitBatches` adds it to trainers.

    Args:
        num_batches: The number of batches per process, in an epoch and in an evaluation.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches: int = at_least(1, "num_batches", num_batches)
        self._limit = Limit(train=num_batches, evaluation=num_batches)

    def listeners(self) -> list[Listener]:
        every = Listener(Callback.on_eval_start, self._count_all)
        return [*super().listeners(), every, *self._limit.listeners()]

    def _count_all(self, run: Run, evaluation: Evaluation) -> None:
        self._limit.evaluation = self.num_batches * run.driver.data_world_size  # this limit counts the batches of all processes


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluate inside the epochs as well, with ``is_intermediate=True`` and the metric ``intermediate_eval_loss``.

    A line announces each evaluation.

    Args:
        eval_every_n_steps: Evaluate before the backward pass of the batches n+1, 2n+1, ... of an epoch.
    """

    def __init__(self, eval_every_n_steps: int) -> None:
        self.eval_every_n_steps: int = at_least(1, "eval_every_n_steps", eval_every_n_steps)

    def on_train_step_end(
        self, trainer: Any, batch: Any = None, batch_output: Any = None, step: int = 0, **kwargs: Any
    ) -> None:
        if step and step % self.eval_every_n_steps == 0 and trainer._eval_dataloader is not None:
            trainer.print(f"\nRunning evaluation after {step} training steps")
            trainer._run_eval_epoch(trainer._eval_dataloader, is_training=True, is_intermediate=True)
            trainer.print("\nResuming training...")


class LimitEvalStepsCallback(TrainerCallback):
    """Use only the first batches in an evaluation.

    Args:
        num_eval_steps: The number of batches over all processes.
        limit_intermediate_only: Do not limit the evaluations at the end of an epoch.
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps: int = at_least(1, "num_eval_steps", num_eval_steps)
        self.limit_intermediate_only = limit_intermediate_only
        self._limits: dict[Evaluation, int | None] = {}

    def listeners(self) -> list[Listener]:
        return [
            *super().listeners(),
            Listener(Callback.on_eval_start, self._limit),
            Listener(Callback.on_eval_end, self._restore),
        ]

    def _limit(self, run: Run, evaluation: Evaluation) -> None:
        self._limits[evaluation] = evaluation.limit
        if is_intermediate(run, evaluation) or not self.limit_intermediate_only:
            ranks = run.driver.data_world_size  # the limit counts the batches of all ranks, which evaluate equally many
            steps = max(self.num_eval_steps // ranks, 1) * ranks
            evaluation.limit = min(steps, evaluation.limit or steps)
            run.print(f"Limiting evaluation to {steps // ranks} steps per process")

    def _restore(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation in self._limits:
            evaluation.limit = self._limits.pop(evaluation)
