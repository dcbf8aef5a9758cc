"""End a training early."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.compat.accelerated.events import StopTrainingError
from cadenza.engine.monitor import Monitor
from cadenza.hooks.numbers import at_least
from cadenza.optim.non_finite import first_not_finite


class TerminateOnNaNCallback(TrainerCallback):
    """End the training and the process when a loss is NaN or infinite. The weights are not updated with this loss.

    Reading the loss waits for the device in every batch.

    Raises:
        SystemExit: At the end of the training, if this callback has stopped it.
    """

    triggered: bool = False
    """Whether such a loss has stopped the current training. A subclass may set it."""
    _found = "the loss is not finite"

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self.triggered = False

    def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self.check_for_nan_after_batch(batch_output, step="training")

    def on_eval_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self.check_for_nan_after_batch(batch_output, step="validation")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if self.triggered:
            raise SystemExit(f"The training was ended: {self._found}")

    def check_for_nan_after_batch(self, batch_output: Mapping[str, Any], step: str | None = None) -> None:
        """Check the loss of a batch in a step of this kind.

        Raises:
            StopTrainingError: The loss is NaN or infinite.
        """
        if "loss" not in batch_output:
            return  # a prediction
        found = first_not_finite([("the loss", torch.as_tensor(batch_output["loss"]))])
        if found is not None:
            self._found, self.triggered = found, True
            raise StopTrainingError(f"Stopping training: {found}{'' if step is None else f', in a {step} step'}")


class EarlyStoppingCallback(TrainerCallback):
    """Stop when a metric has not improved for some epochs.

    Args:
        early_stopping_patience: Stop after this many epochs without improvement; 0 stops after the first epoch.
        early_stopping_threshold: The minimum change that counts as an improvement, exclusive.
        watch_metric: The name of the metric in the run history.
        greater_is_better: Whether a larger value is better. NaN is never better.
        reset_on_train: Forget the best value when another training starts.

    Raises:
        ValueError: A number is below 0; or, at the end of an epoch, the run history has no such metric.

    >>> from cadenza.testing import simulate
    >>> stop = EarlyStoppingCallback(early_stopping_patience=2)
    >>> run = simulate([stop], metrics={"eval/loss": [1.0, 0.995, 0.98, 0.975, 0.974, 0.9]})
    Improvement of eval_loss_epoch: it is 1
    No improvement of eval_loss_epoch by more than 0.01 in 1 of 2 epochs: it is 0.995, the best is 1
    Improvement of eval_loss_epoch by 0.02: it is 0.98
    No improvement of eval_loss_epoch by more than 0.01 in 1 of 2 epochs: it is 0.975, the best is 0.98
    No improvement of eval_loss_epoch by more than 0.01 in 2 of 2 epochs: it is 0.974, the best is 0.98
    """

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False,
        reset_on_train: bool = True,
    ) -> None:
        if not early_stopping_threshold >= 0:
            raise ValueError(f"early_stopping_threshold must be at least 0; got {early_stopping_threshold!r}")
        self.early_stopping_patience: int = at_least(0, "early_stopping_patience", early_stopping_patience)
        self.early_stopping_threshold = early_stopping_threshold
        self.watch_metric: str = watch_metric
        self.greater_is_better: bool = greater_is_better
        self.reset_on_train: bool = reset_on_train
        self.operator: Callable[[Any, Any], Any] = operator.gt if greater_is_better else operator.lt
        """Returns whether its first argument is better than the second."""
        self.early_stopping_patience_counter: int = 0
        mode = "max" if greater_is_better else "min"
        self._monitor = Monitor(watch_metric, mode, owner=type(self).__name__, min_delta=early_stopping_threshold)  # type: ignore[arg-type]  # one of the two

    @property
    def best_metric(self) -> float | None:
        """The best value so far; None before the first. A subclass may set it."""
        return None if abs(self._monitor.best) == float("inf") else self._monitor.best

    @best_metric.setter
    def best_metric(self, value: float | None) -> None:
        self._monitor.reset()
        if value is not None:
            self._monitor.best = float(value)

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if self.reset_on_train and not trainer.native_run.progress.batch:  # not if the training resumes
            self._monitor.reset()
            self.early_stopping_patience_counter = 0

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        value, before = float(trainer.run_history.get_latest_metric(self.watch_metric)), self.best_metric
        if self._monitor.update(trainer.native_run, value):
            self.early_stopping_patience_counter = 0
            amount = "" if before is None else f" by {abs(value - before):.4g}"
            trainer.print(f"Improvement of {self.watch_metric}{amount}: it is {value:.6g}")
        else:
            self.early_stopping_patience_counter += 1
            trainer.print(
                f"No improvement of {self.watch_metric} by more than {self.early_stopping_threshold} in "
                f"{self.early_stopping_patience_counter} of {self.early_stopping_patience} epochs: it is {value:.6g}, the best "
                f"is {before if before is None else format(before, '.6g')}"
            )
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            raise StopTrainingError(
                f"Stopping training: no improvement of {self.watch_metric} by more than {self.early_stopping_threshold} in "
                f"{self.early_stopping_patience_counter} epochs"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.early_stopping_patience_counter, **self._monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.early_stopping_patience_counter = state["counter"]
        self._monitor.load_state_dict(state)
