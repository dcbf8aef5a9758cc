"""``module.trainer`` before the run: in ``setup``, ``configure_model`` and ``configure_optimizers``."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from cadenza.compat.adapter.view import Weak
from cadenza.compat.lightning.setup_view import CallbackLists
from cadenza.engine.arguments import checked_accumulate
from cadenza.errors import AdapterError, nearest
from cadenza.loading import num_batches
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached


class FitLoopBeforeRun:
    """``trainer.fit_loop`` before the first step.

    Args:
        trainer: The trainer that the LightningModule reads.
    """

    def __init__(self, trainer: TrainerBeforeRun) -> None:
        self.max_epochs: int = trainer.max_epochs
        """The largest number of epochs; -1 if there is no limit."""
        self.max_steps: int = trainer.max_steps
        """The largest number of steps; -1 if there is no limit."""

    def setup_data(self) -> None:
        """Do nothing: ``trainer.train_dataloader`` is the loader already."""


class TrainerBeforeRun(CallbackLists):
    """The part of the trainer that a LightningModule can read before the first step."""

    title: ClassVar[str] = "trainer"
    _attached: Weak[Attached] = Weak()

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    # -- the length of the run ---------------------------------------------------------------------

    @property
    def max_epochs(self) -> int:
        """The largest number of epochs; -1 if there is no limit."""
        given: int | None = self._attached.arguments.get("max_epochs")
        return -1 if given is None else given

    @property
    def max_steps(self) -> int:
        """The largest number of steps; -1 if there is no limit."""
        given: int | None = self._attached.arguments.get("max_steps")
        return -1 if given is None else given

    @property
    def num_training_batches(self) -> float:
        """The number of batches in an epoch on this rank; infinite if the loader has no length."""
        batches = num_batches(self.train_dataloader, self._attached.driver.data_shard())
        return min(limit for limit in (math.inf, batches, self._attached.limit) if limit is not None)

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of steps of the run; infinite if unknown."""
        batches = self.num_training_batches
        limits = Progress(
            max_epochs=self._attached.arguments.get("max_epochs"),
            max_steps=self._attached.arguments.get("max_steps"),
            batches_per_epoch=None if math.isinf(batches) else int(batches),
        )
        total = limits.total("step", self.accumulate_grad_batches)
        return math.inf if total is None else total

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches in a step."""
        return checked_accumulate(self._attached.arguments.get("accumulate", 1), None)

    @property
    def current_epoch(self) -> int:
        """0."""
        return 0

    @property
    def global_step(self) -> int:
        """0."""
        return 0

    @property
    def is_last_batch(self) -> bool:
        """False."""
        return False

    should_stop = is_last_batch

    @property
    def min_epochs(self) -> int:
        """0: a native run has no minimum."""
        return 0

    @property
    def min_steps(self) -> None:
        """None: a native run has no minimum."""

    @property
    def limit_train_batches(self) -> float:
        """1.0: put `Limit` into callbacks."""
        return 1.0

    limit_val_batches = limit_train_batches

    @property
    def gradient_clip_val(self) -> None:
        """None: `ClipGradients` in callbacks clips."""

    gradient_clip_algorithm = gradient_clip_val

    @property
    def fit_loop(self) -> FitLoopBeforeRun:
        """An object with ``setup_data``, ``max_epochs`` and ``max_steps``."""
        return FitLoopBeforeRun(self)

    # -- processes and devices ---------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._attached.driver.world_size

    @property
    def num_devices(self) -> int:
        """The number of processes, which have one device each."""
        return self._attached.driver.world_size

    @property
    def global_rank(self) -> int:
        """The index of this process."""
        return self._attached.driver.rank

    @property
    def local_rank(self) -> int:
        """The index of this process on its machine."""
        return self._attached.driver.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self._attached.driver.is_main

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return max(1, self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))

    @property
    def strategy(self) -> Any:
        """An object with ``root_device``, ``barrier`` and ``broadcast``."""
        return self

    @property
    def node_rank(self) -> int:
        """The index of this machine."""
        return self.global_rank // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self._attached.driver.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        driver = self._attached.driver
        return obj if self.world_size == 1 else driver.broadcast(obj) if src == 0 else driver.gather(obj)[src]

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._attached.driver.device

    # -- the parts ---------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The LightningModule."""
        return self._attached.module

    @property
    def datamodule(self) -> Any:
        """The LightningDataModule; None if there is none."""
        return self._attached.loaders.datamodule

    @property
    def train_dataloader(self) -> Any:
        """The training loader. In ``setup``, it is created on first read."""
        return self._attached.loaders.training()

    @property
    def model(self) -> Any:
        """The LightningModule."""
        return self._attached.module

    @property
    def optimizers(self) -> list[Any]:
        """An empty list."""
        return []

    lr_scheduler_configs = optimizers

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """An empty mapping."""
        return {}

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """An empty mapping."""
        return {}

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """An empty mapping."""
        return {}

    @property
    def enable_validation(self) -> bool:
        """Whether there is a validation loader."""
        return self._attached.loaders.val is not None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader or loaders; None if there are none."""
        return self._attached.loaders.val

    @property
    def precision(self) -> str:
        """The precision under Lightning's name."""
        return {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(self._attached.arguments.get("precision", "fp32"), "32-true")

    @property
    def state(self) -> Any:
        """The ``TrainerState`` before the training."""
        states = self._attached.home("trainer.states")
        training, running = states.RunningStage.TRAINING, states.TrainerStatus.RUNNING
        return states.TrainerState(fn=states.TrainerFn.FITTING, stage=training, status=running)

    @property
    def callbacks(self) -> list[Any]:
        """The user's callbacks."""
        return list(self._attached.arguments.get("callbacks", ()))

    @property
    def default_root_dir(self) -> str:
        """The run directory, or the working directory without one."""
        return self.log_dir or os.path.abspath(os.curdir)

    @property
    def log_dir(self) -> str | None:
        """The run directory; None without one."""
        directory = self._attached.arguments.get("directory")
        return None if directory is None else os.path.abspath(directory)

    @property
    def training(self) -> bool:
        """True."""
        return True

    @property
    def sanity_checking(self) -> bool:
        """False."""
        return False

    @property
    def validating(self) -> bool:
        """False."""
        return False

    @property
    def testing(self) -> bool:
        """False."""
        return False

    @property
    def predicting(self) -> bool:
        """False."""
        return False

    @property
    def evaluating(self) -> bool:
        """False."""
        return False

    @property
    def fast_dev_run(self) -> bool:
        """False."""
        return False

    @property
    def _results(self) -> None:
        """None, so that ``self.log`` says that there is no run."""

    @property
    def barebones(self) -> bool:
        """False."""
        return False

    @property
    def loggers(self) -> list[Any]:
        """An empty list: sinks have no loggers of Lightning."""
        return []

    @property
    def logger(self) -> Any:
        """None: sinks have no loggers of Lightning."""
        return None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [name for name in dir(type(self)) if not name.startswith("_")]
        raise AdapterError(
            f"{type(self._attached.module).__name__} reads trainer.{name} before the run, when it is not known. Known are: "
            f"{', '.join(known)}.{nearest(name, known)}",
            name=name,
            obj=self,
        )
