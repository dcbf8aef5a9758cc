"""The part of ``trainer`` with the setup of a run: limits, loaders, devices, schedules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.log_training import LogTraining
from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.lightning.changes import Changes
from cadenza.compat.lightning.counters import CountersView
from cadenza.compat.lightning.library import imported, is_lightning
from cadenza.compat.lightning.scheduler_list import SchedulerList
from cadenza.engine.session import session_of
from cadenza.hooks.schedule import Every
from cadenza.loading.loaders import length_of

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class CallbackLists:
    """The callbacks of ``trainer``."""

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of Lightning in the list."""
        raise NotImplementedError

    def _of_class(self, name: str) -> list[Any]:
        return [callback for callback in self.callbacks if is_lightning(callback, name)]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Each ``EarlyStopping`` of Lightning in the list."""
        return self._of_class("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first ``EarlyStopping`` of Lightning; None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Each ``Checkpoint`` of Lightning in the list."""
        return self._of_class("Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first ``Checkpoint`` of Lightning; None without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar of Lightning; None without one."""
        return next(iter(self._of_class("ProgressBar")), None)


class SetupView(CallbackLists, CountersView):
    """The setup of a run under the names of Lightning's ``Trainer``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._schedulers: SchedulerList | None = None
        self._changes = Changes(run)

    # -- limits -------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int:
        """The limit of epochs; -1 without one."""
        limit = self._run.progress.max_epochs
        return -1 if limit is None else limit

    @property
    def min_epochs(self) -> int:
        """0: a native run has no minimum."""
        return 0

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 without one."""
        limit = self._run.progress.max_steps
        return -1 if limit is None else limit

    @property
    def min_steps(self) -> int | None:
        """None: a native run has no minimum."""
        return None

    @property
    def num_training_batches(self) -> int | float:
        """The batches of an epoch on this rank; infinite if unknown."""
        batches = self._run.progress.batches_per_epoch
        return math.inf if batches is None else batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """The batches of each evaluation loader on this rank."""
        return self._batches(self._evaluation)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """The batches of each loader in the sanity check."""
        return self._batches(self._evaluation)

    @property
    def num_test_batches(self) -> list[int | float]:
        """The batches of each test loader."""
        return self._batches(self._evaluation)

    @property
    def num_predict_batches(self) -> list[int | float]:
        """The batches of each prediction loader."""
        return self._batches(self._evaluation)

    def _batches(self, evaluation: Evaluation | None) -> list[int | float]:
        if evaluation is None:
            return [math.inf if each.batches is None else each.batches for each in self._run.evaluations.values()]
        if not evaluation.sources:
            return [math.inf if evaluation.batches is None else evaluation.batches]
        lengths = [length_of(source) for source in evaluation.sources.values()]
        return [math.inf if length is None else length for length in lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The steps of the whole run; infinite without a limit."""
        session = session_of(self._run)
        total = self._run.progress.total("step", session.accumulate)
        return math.inf if total is None else total

    @property
    def accumulate_grad_batches(self) -> int:
        """The batches of a step."""
        return session_of(self._run).step.window.size

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self._changes.resize(batches)

    # -- schedules ----------------------------------------------------------------------------------

    @property
    def log_every_n_steps(self) -> int:
        """The interval of `LogTraining` in steps; 1 without it."""
        for log in callbacks_of(self._run, LogTraining):
            if isinstance(log.every, Every) and log.every.unit == "step":
                return int(log.every.count)
        return 1

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """The interval of the first `Evaluate` in epochs; None if it counts something else."""
        return validation_interval(self._run)[1]

    @property
    def val_check_interval(self) -> int | float:
        """The interval of the first `Evaluate` in batches, or in epochs if that is at most 1."""
        return validation_interval(self._run)[0]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of `LearningRate` as ``LRSchedulerConfig``."""
        own: list[Any] | None = self._own.get("lr_scheduler_configs")
        if own is not None:
            return own
        if self._schedulers is None:
            self._schedulers = SchedulerList(self._run)
        return self._schedulers.refreshed()

    # -- data ---------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader."""
        return self._own.get("train_dataloader", session_of(self._run).loader)

    @property
    def val_dataloaders(self) -> Any:
        """The loader of `Evaluate`; a list of several; None without one."""
        loaders = [evaluation.loader for evaluation in self._run.evaluations.values()]
        given = loaders[0] if len(loaders) == 1 else loaders or None
        return self._own.get("val_dataloaders", given)

    @property
    def test_dataloaders(self) -> Any:
        """The loader of ``Trainer.evaluate(name="test")`` while it runs."""
        return None if self._evaluation is None else self._evaluation.loader

    @property
    def predict_dataloaders(self) -> Any:
        """The loader of ``Trainer.predict`` while it runs."""
        return None if self._evaluation is None else self._evaluation.loader

    @property
    def datamodule(self) -> Any:
        """The LightningDataModule of ``Trainer.from_lightning``; else None."""
        return self._own.get("datamodule")

    @property
    def enable_validation(self) -> bool:
        """Whether the list has `Evaluate`."""
        return bool(self._run.evaluations)

    @property
    def limit_train_batches(self) -> float:
        """1.0: put `Limit` into callbacks."""
        return 1.0

    @property
    def limit_val_batches(self) -> float:
        """1.0: give `Evaluate` a limit."""
        return 1.0

    @property
    def fast_dev_run(self) -> bool:
        """False."""
        return False

    @property
    def barebones(self) -> bool:
        """False."""
        return False

    # -- processes and devices ----------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """The number of processes on this machine."""
        return self._ranks_here

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return max(1, self.world_size // self.num_devices)

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this machine."""
        return list(range(self.num_devices))

    @property
    def precision(self) -> str:
        """``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``."""
        name = session_of(self._run).precision.name
        return {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}.get(name, name)

    @property
    def precision_plugin(self) -> Any:
        """The Lightning precision plugin for the dtype of the run."""
        if self.precision in ("bf16-mixed", "16-mixed"):
            return imported("plugins.precision", "MixedPrecision")(self.precision, self._run.device.type)
        return imported("plugins.precision", "Precision")()

    @property
    def accelerator(self) -> Any:
        """The accelerator of Lightning for the device."""
        kind = {"cuda": "CUDAAccelerator", "mps": "MPSAccelerator"}.get(self._run.device.type, "CPUAccelerator")
        return imported("accelerators", kind)()

    # -- folders ------------------------------------------------------------------------------------

    @property
    def log_dir(self) -> str | None:
        """The run directory; None without one."""
        directory = session_of(self._run).directory
        return None if directory is None else str(directory)

    @property
    def ckpt_path(self) -> None:
        """None: a native run does not continue from a file of Lightning."""

    @property
    def default_root_dir(self) -> str:
        """The run directory, or the working directory without one."""
        return self.log_dir or str(self._run.info.home)


def validation_interval(run: Run) -> tuple[int | float, int | None]:
    """Return ``val_check_interval`` and ``check_val_every_n_epoch`` of the first `Evaluate` in the list.

    The second is None unless it evaluates at the end of epochs. Without `Evaluate`: 1.0 and 1, the defaults.
    """
    found = callbacks_of(run, Evaluate)
    if not found:
        return 1.0, 1
    every = found[0].every
    if every.only_epochs and isinstance(every, Every):
        return 1.0, int(every.count)
    if isinstance(every, Every) and every.unit == "step":
        return int(every.count) * session_of(run).step.window.size, None
    if isinstance(every, Every) and every.unit == "batch":
        return int(every.count), None
    if isinstance(every, Every) and every.unit == "epoch":
        return float(every.count), 1
    return 1.0, None
