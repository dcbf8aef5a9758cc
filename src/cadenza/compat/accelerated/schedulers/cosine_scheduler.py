"""A learning rate that falls like a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from cadenza.compat.accelerated.placeholders import TrainerPlaceholderValues
from cadenza.compat.accelerated.schedulers.scheduler_base import StatefulSchedulerBase

_EPOCHS: Any = TrainerPlaceholderValues.NUM_EPOCHS
_UPDATES: Any = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH


class CosineLrScheduler(StatefulSchedulerBase):
    """Warm up in a line, fall like half a cosine (Loshchilov and Hutter 2017), and stay at the end.

    Args:
        optimizer: Whose learning rates are set.
        total_num_epochs: Epochs in all, those of warm-up and cool-down among them.
        num_update_steps_per_epoch: Updates in an epoch.
        k_decay: The exponent of time in the cosine (Zhang and Li 2020); 1 is the plain one.
        lr_min: Where it ends.
        min_lr_ratio: The same, as a share of the first learning rate.
        num_warmup_epochs: Epochs in which it rises from `warmup_starting_lr` to the optimizer's learning rate.
        warmup_starting_lr: Where it begins.
        warmup_starting_lr_ratio: The same, as a share of the first learning rate.
        num_cooldown_epochs: Epochs at the end in which it stays.

    Raises:
        ValueError: There is no update between warm-up and cool-down.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_epochs: int,
        num_update_steps_per_epoch: int,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        super().__init__(optimizer)
        self.total_updates = total_num_epochs * num_update_steps_per_epoch
        self.warmup_updates = int(num_warmup_epochs * num_update_steps_per_epoch)
        self.falling_until = self.total_updates - int(num_cooldown_epochs * num_update_steps_per_epoch)
        if self.falling_until <= self.warmup_updates:
            raise ValueError(
                f"of {total_num_epochs} epochs, {num_warmup_epochs} are for warm-up and {num_cooldown_epochs} for cool-down: "
                "expected at least one update between them"
            )
        self.k_decay, self.lr_min, self.min_lr_ratio = k_decay, lr_min, min_lr_ratio
        self.warmup_starting_lr, self.warmup_starting_lr_ratio = warmup_starting_lr, warmup_starting_lr_ratio
        self.step()

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the learning rate of each group after so many updates."""
        return [self._value(rate, num_updates) for rate in self.base_lr_values]

    def _value(self, rate: float, update: int) -> float:
        if update < self.warmup_updates:
            ratio = self.warmup_starting_lr_ratio
            start = self.warmup_starting_lr if ratio is None else ratio * rate
            return start + (rate - start) * update / self.warmup_updates
        end = self.lr_min if self.min_lr_ratio is None else self.min_lr_ratio * rate
        if update >= self.falling_until:
            return end
        passed, whole = update - self.warmup_updates, self.falling_until - self.warmup_updates
        return end + (rate - end) / 2 * (1 + math.cos(math.pi * (passed / whole) ** self.k_decay))

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: int = _EPOCHS,
        num_update_steps_per_epoch: int = _UPDATES,
        **arguments: Any,
    ) -> Callable[[Optimizer], CosineLrScheduler]:
        """Return what ``Trainer.train(create_scheduler_fn=...)`` takes; what is not given is that of the run."""
        arguments |= {"total_num_epochs": total_num_epochs, "num_update_steps_per_epoch": num_update_steps_per_epoch}
        return partial(cls, **arguments)
