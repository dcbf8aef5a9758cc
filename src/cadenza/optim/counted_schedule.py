"""Schedules that get the number of the epoch or update in each call, as those of timm, in the form of a torch scheduler."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Counted(Protocol):
    """A schedule of timm: its caller counts, and passes the count."""

    optimizer: Optimizer
    t_in_epochs: bool
    """Whether it counts epochs. Otherwise it counts updates."""

    def step(self, epoch: int, metric: float | None = None) -> None: ...
    def step_update(self, num_updates: int, metric: float | None = None) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def is_counted(schedule: object) -> TypeGuard[Counted]:
    """Return whether `schedule` has the interface of timm."""
    names = ("optimizer", "t_in_epochs", "step", "step_update", "state_dict", "load_state_dict")
    return not isinstance(schedule, type) and all(hasattr(schedule, name) for name in names)


class CountedSchedule(LRScheduler):
    """Counts for a schedule that must be given the count. The count is part of its state.

    Args:
        schedule: The schedule. ``step(1)`` or ``step_update(1)`` sets the rate after the first epoch or update.

    Raises:
        ValueError: It is a plateau schedule, which needs results and does not save its state.
    """

    def __init__(self, schedule: Counted) -> None:  # a scheduler of torch would set the rates here
        name = type(schedule).__name__
        if name == "PlateauLRScheduler":
            raise ValueError(
                "LearningRate cannot resume timm's PlateauLRScheduler, because it does not save its counters. Use "
                'LearningRate(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor="eval/loss").'
            )
        self.schedule: Counted = schedule
        self.optimizer: Optimizer = schedule.optimizer
        self.last_epoch: int = 0

    @property
    def per(self) -> str:
        """The unit that it counts: ``"epoch"`` or ``"step"``."""
        return "epoch" if self.schedule.t_in_epochs else "step"

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        (self.schedule.step if self.schedule.t_in_epochs else self.schedule.step_update)(self.last_epoch)

    def get_last_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**self.schedule.state_dict(), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self.schedule.load_state_dict({name: value for name, value in state_dict.items() if name != "last_epoch"})
