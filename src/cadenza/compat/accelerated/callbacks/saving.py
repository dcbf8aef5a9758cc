"""Save the best weights, and training states."""

from __future__ import annotations

import math
import operator
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.engine.monitor import Monitor
from cadenza.hooks.numbers import at_least_or_none


class SaveBestModelCallback(TrainerCallback):
    """Save a checkpoint after each epoch in which a metric improved, and load the best one at the end.

    Args:
        save_path: The file, written by `Trainer.save_checkpoint`. It holds the metric under its name and as ``loss``.
        watch_metric: The name of the metric in the run history.
        greater_is_better: Whether a larger value is better. NaN is never better.
        reset_on_train: Forget the best value when another training starts.
        save_optimizer: Whether the file holds the optimizer's state.
        save_scheduler: Whether the file holds the scheduler's state, if there is a scheduler.
        load_saved_checkpoint: Whether to load the file at the end of the training.

    Raises:
        ValueError: At the end of an epoch the run history has no such metric.
    """

    def __init__(
        self,
        save_path: str | os.PathLike[str] = "best_model.pt",
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False,
        reset_on_train: bool = True,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        load_saved_checkpoint: bool = True,
    ) -> None:
        os.fspath(save_path)  # raises for a wrong type now rather than after the first epoch
        self.save_path: str | os.PathLike[str] = save_path
        self.watch_metric: str = watch_metric
        self.greater_is_better: bool = greater_is_better
        self.reset_on_train: bool = reset_on_train
        self.load_saved_checkpoint: bool = load_saved_checkpoint
        self.save_optimizer: bool = save_optimizer
        self.save_scheduler: bool = save_scheduler
        self.operator: Callable[[Any, Any], Any] = operator.gt if greater_is_better else operator.lt
        """Returns whether its first argument is better than the second."""
        self._monitor = Monitor(watch_metric, "max" if greater_is_better else "min", owner=type(self).__name__)
        self.best_metric_epoch: int | None = None
        """The epoch of the best value; None before the first."""

    @property
    def best_metric(self) -> float | None:
        """The best value so far; None before the first. A subclass may set it."""
        return None if math.isinf(self._monitor.best) else self._monitor.best

    @best_metric.setter
    def best_metric(self, value: float | None) -> None:
        self._monitor.reset()
        if value is not None:
            self._monitor.best = float(value)

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if self.reset_on_train and not trainer.native_run.progress.batch:  # not if the training resumes
            self._monitor.reset()
            self.best_metric_epoch = None

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        value = float(trainer.run_history.get_latest_metric(self.watch_metric))
        if self._monitor.update(trainer.native_run, value):
            self.best_metric_epoch = trainer.run_history.current_epoch
            self._save(trainer, value)

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if self.best_metric_epoch is None:
            trainer.print(f"Nothing was saved to {os.fspath(self.save_path)}: {self.watch_metric} was never recorded")
            return
        trainer.print(f"The best {self.watch_metric} was {self._monitor.best:.6g}, in epoch {self.best_metric_epoch}")
        if self.load_saved_checkpoint:
            trainer.load_checkpoint(self.save_path)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.best_metric_epoch, **self._monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_metric_epoch = state["epoch"]
        self._monitor.load_state_dict(state)

    def _save(self, trainer: Any, value: float) -> None:
        trainer.save_checkpoint(
            self.save_path,
            checkpoint_kwargs={self.watch_metric: value, "loss": value},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
        )


class SaveTrainingStateCallback(TrainerCallback):
    """Save training states. `Trainer.train(resume_from=...)` continues from one of them with bit-identical results.

    The folders are named ``step_<n>`` (n counts the batches of the training), ``epoch_<n>`` and ``final``.

    Args:
        save_dir: The folder of these folders.
        save_every_n_epochs: Save after every n-th epoch; None: never.
        save_every_n_steps: Save after every n-th batch, once its update is complete; None: never.
        save_at_end: Save at the end of the training.
        max_checkpoints: Keep this many folders of one training, the newest; None keeps all.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "training_states",
        save_every_n_epochs: int | None = None,
        save_every_n_steps: int | None = None,
        save_at_end: bool = True,
        max_checkpoints: int | None = None,
    ) -> None:
        self.save_dir: Path = Path(save_dir).absolute()
        self.save_at_end: bool = save_at_end
        self.save_every_n_epochs: int | None = at_least_or_none(1, "save_every_n_epochs", save_every_n_epochs)
        self.save_every_n_steps: int | None = at_least_or_none(1, "save_every_n_steps", save_every_n_steps)
        self.max_checkpoints: int | None = at_least_or_none(1, "max_checkpoints", max_checkpoints)
        self._saved_checkpoints: list[Path] = []
        self._global_step = 0

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if not trainer.native_run.progress.batch:  # not if the training resumes
            self._saved_checkpoints, self._global_step = [], 0
        elif self._global_step < 0:
            self._global_step = trainer.native_run.progress.batch

    def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self._global_step += 1
        if self.save_every_n_steps is not None and self._global_step % self.save_every_n_steps == 0:
            self._save(trainer, f"step_{self._global_step}")

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        if self.save_every_n_epochs is not None and epoch % self.save_every_n_epochs == 0:
            self._save(trainer, f"epoch_{epoch}")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if self.save_at_end:
            self._save(trainer, "final")

    def state_dict(self) -> dict[str, Any]:
        return {"saved": [folder.name for folder in self._saved_checkpoints], "step": self._global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved_checkpoints = [self.save_dir / name for name in state["saved"]]
        self._global_step = state.get("step", -1)  # missing in states of earlier versions of Cadenza

    def _save(self, trainer: Any, name: str) -> None:
        folder = self.save_dir / name
        if folder not in self._saved_checkpoints:
            self._saved_checkpoints.append(folder)
        trainer.save_training_state(str(folder), checkpoint_kwargs={"global_step": self._global_step})
        trainer.print(f"\nSaving training state to {folder}")
        self._cleanup_old_checkpoints(trainer)

    def _cleanup_old_checkpoints(self, trainer: Any) -> None:
        """Remove the oldest folders beyond `max_checkpoints`, after the newer ones are written."""
        while self.max_checkpoints is not None and len(self._saved_checkpoints) > self.max_checkpoints:
            trainer.native_run.after_step(partial(_remove, trainer, self._saved_checkpoints.pop(0)))


def _remove(trainer: Any, folder: Path) -> None:
    if trainer.native_run.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        trainer.print(f"Removed old training state: {folder}")
