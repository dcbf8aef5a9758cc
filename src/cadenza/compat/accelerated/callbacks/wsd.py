"""Checkpoints of a WSD schedule, before and after each decay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.compat.accelerated.tracking import InMemoryRunHistory


class WSDCheckpointCallback(TrainerCallback):
    """Save a checkpoint before and after each decay of a `WSDLrScheduler`.

    Before a decay it writes the folder ``checkpoint_<n>_wsd_pre_decay``, a training state after n updates. After a decay it
    writes the file ``checkpoint_<n>_wsd_post_decay.pt``, with `Trainer.save_checkpoint`.

    To train longer, pass one of them as `initial_checkpoint`, and create the schedule with
    ``is_continuation_from_checkpoint=True``. Without that argument, the schedule continues from its position in the checkpoint.
    To continue an interrupted training, pass the folder to ``Trainer.train(resume_from=...)`` instead.

    Args:
        save_dir: The folder for the checkpoints. It is created at once.
        save_optimizer: Whether the files hold the optimizer's state.
        save_scheduler: Whether the files hold the scheduler's state.
        initial_checkpoint: A folder or file to load when the training starts. If it does not exist, a warning says so.

    Raises:
        ValueError: At the start of the training, the scheduler has no ``get_checkpoint_steps``.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "checkpoints",
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        initial_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.save_dir: Path = Path(save_dir)
        self.save_optimizer: bool = save_optimizer
        self.save_scheduler: bool = save_scheduler
        self.initial_checkpoint: Path | None = Path(initial_checkpoint) if initial_checkpoint else None
        self.last_checkpoint_step: int | None = None
        """The number of updates at the last checkpoint; None before the first."""
        self.checkpoint_steps: set[int] | None = None
        self.decay_fraction: float | None = None
        self.decay_info: list[dict[str, int]] | None = None
        self._resumes = False
        self.save_dir.mkdir(parents=True, exist_ok=True)

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if not hasattr(trainer.scheduler, "get_checkpoint_steps"):
            raise ValueError(
                f"{type(self).__name__} needs a scheduler with get_checkpoint_steps; got "
                f"{type(trainer.scheduler).__name__}. Use create_scheduler_fn=WSDLrScheduler.create_scheduler_fn()"
            )
        if not self._resumes:
            self.last_checkpoint_step = self._loaded(trainer)
        self._resumes = False
        self.checkpoint_steps = set(trainer.scheduler.get_checkpoint_steps())
        self.decay_fraction = trainer.scheduler.decay_phase_ratio
        self.decay_info = trainer.scheduler.get_decay_info()

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self._save_if_due(trainer)  # a decay may begin with the first update

    def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self._save_if_due(trainer)  # only if the schedule advanced without an update
        updates = trainer.scheduler.get_current_step() + 2  # once the current step is complete
        period = trainer.scheduler.get_phase_info(updates)
        if updates in (period["pre_decay_step"], period["period_end"]):
            trainer.native_run.after_step(partial(self._save_if_due, trainer))

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        self._save_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"last_checkpoint_step": self.last_checkpoint_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_checkpoint_step, self._resumes = state["last_checkpoint_step"], True

    def _loaded(self, trainer: Any) -> int | None:
        """Load the initial checkpoint; return its number of updates."""
        path = self.initial_checkpoint
        if path is None:
            return None
        if not trainer.native_run.driver.broadcast(path.exists()):
            trainer.native_run.warn(f"{os.fspath(path)!r} does not exist, so the training starts without it")
            return None
        if path.is_dir():
            history, trainer.run_history = trainer.run_history, InMemoryRunHistory()  # a new training starts a new history
            try:
                content = trainer.load_training_state(str(path))
            finally:
                trainer.run_history = history
        else:
            content = trainer.load_checkpoint(path)
        step: int | None = content.get("step")
        trainer.print(f"Loaded {path}, saved after {step} updates")
        return step

    def _save_if_due(self, trainer: Any) -> None:
        """Save if a decay begins or ends here. Every process must call this."""
        updates, last = trainer.scheduler.get_current_step() + 1, self.last_checkpoint_step
        if last is not None and updates < last:  # the schedule has restarted
            self.last_checkpoint_step = None
        if updates == last:
            return
        period = trainer.scheduler.get_phase_info(updates)
        if updates == period["period_end"] and updates:
            self.last_checkpoint_step = updates
            self._save_file(trainer, updates)
        elif updates == period["pre_decay_step"]:
            self.last_checkpoint_step = updates
            folder = str(self.save_dir / f"checkpoint_{updates}_wsd_pre_decay")
            trainer.save_training_state(folder, checkpoint_kwargs=self._facts(trainer, updates, "wsd_pre_decay"))
            trainer.print(f"The decay begins after {updates} updates: saved {folder}")

    def _save_file(self, trainer: Any, updates: int) -> None:
        path = self.save_dir / f"checkpoint_{updates}_wsd_post_decay.pt"
        trainer.save_checkpoint(
            path,
            checkpoint_kwargs=self._facts(trainer, updates, "wsd_post_decay"),
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
        )
        trainer.print(f"The decay ends after {updates} updates: saved {path}")

    def _facts(self, trainer: Any, updates: int, kind: str) -> dict[str, Any]:
        """Return the additional entries of a checkpoint under pytorch-accelerated's names."""
        return {
            "step": updates,
            "checkpoint_type": kind,
            "total_steps": trainer.run_config.max_num_train_steps,
            "decay_fraction": self.decay_fraction,
            "timestamp": datetime.now().isoformat(),
        }
