"""Print metrics and progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.hooks.listener import Listener
from cadenza.sinks.progress_bar import ProgressBar


class LogMetricsCallback(TrainerCallback):
    """Print the latest value of each metric. Override `log_metrics` to send them elsewhere.

    Metrics with ``train`` in their names are printed after the steps of an epoch, all others after an evaluation.
    """

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._log_latest_metrics(trainer, [name for name in trainer.run_history.get_metric_names() if "train" in name])

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._log_latest_metrics(trainer, [name for name in trainer.run_history.get_metric_names() if "train" not in name])

    def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Show metrics by name. Called on every process."""
        for name, value in metrics.items():
            trainer.print(f"\n{name}: {value}")

    def _log_latest_metrics(self, trainer: Any, metric_names: Iterable[str]) -> None:
        self.log_metrics(trainer, self._get_latest_metrics(trainer, metric_names))

    def _get_latest_metrics(self, trainer: Any, metric_names: Iterable[str]) -> dict[str, Any]:
        return {name: trainer.run_history.get_latest_metric(name) for name in sorted(metric_names)}


class PrintProgressCallback(TrainerCallback):
    """Print a line at the start and the end of a training or evaluation, and at the start of an epoch."""

    shows_progress = True

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting training run")

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting eval epoch")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting evaluation run")

    def on_evaluation_run_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("Finishing evaluation run")


class ProgressBarCallback(TrainerCallback):
    """Show the native `ProgressBar`, which reads the counters of the run in a thread.

    An error in it is reported, and the training continues without it.
    """

    shows_progress = True
    on_fault: Literal["raise", "disable"] = "disable"

    absent: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pbar", "eval_pbar"),
        "The native bar draws in a thread. Log values with trainer.native_run.log, or write a TrainerCallback with a tqdm bar.",
    )

    def __init__(self) -> None:
        self._bar = ProgressBar()

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), *self._bar.listeners()]
