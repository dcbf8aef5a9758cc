"""Plain values shared by the parts of a LightningModule's run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ScheduleConfig:
    """A scheduler and its interval: the entries of ``lr_scheduler`` with Lightning's defaults."""

    scheduler: Any
    """An object with ``step``, ``state_dict`` and ``load_state_dict``."""
    name: str | None = None
    """The name under which learning rates are logged."""
    interval: str = "epoch"
    """``"step"`` or ``"epoch"``."""
    frequency: int = 1
    """The number of intervals between two steps."""
    reduce_on_plateau: bool = False
    """Whether the scheduler is stepped with the value of `monitor`."""
    monitor: str | None = None
    """The name of a logged value."""
    strict: bool = True
    """Whether a missing value of `monitor` is an error."""


@dataclass
class ManualSteps:
    """The optimizer steps of a run with manual optimization."""

    count: int = 0
    """The number of steps so far."""


@dataclass
class Loaders:
    """The source of a run's loaders."""

    datamodule: Any = None
    """The LightningDataModule; None if there is none."""
    train: Any = None
    """The training loader."""
    val: Any = None
    """The validation loader or loaders; None if there are none."""

    def training(self) -> Any:
        """Return the training loader, which a subclass may create on demand."""
        return self.train
