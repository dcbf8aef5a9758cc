"""A cosine learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.placeholders import TrainerPlaceholderValues
from cadenza.compat.accelerated.schedulers.scheduler_base import StatefulSchedulerBase

advise(__name__)

_EPOCHS: Any = TrainerPlaceholderValues.NUM_EPOCHS
_UPDATES: Any = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH


class CosineLrScheduler(StatefulSchedulerBase):
    """Linear warm-up, cosine decay (Loshchilov and Hutter 2017), then a constant rate.

    Args:
        optimizer: The optimizer.
        total_num_epochs: The number of epochs, warm-up and cool-down included.
        num_update_steps_per_epoch: The number of updates in an epoch.
        k_decay: The exponent of time in the cosine (Zhang and Li 2020); 1 gives the plain cosine.
        lr_min: The final learning rate.
        min_lr_ratio: The final learning rate as a fraction of the initial one.
        num_warmup_epochs: Epochs in which the rate rises from `warmup_starting_lr` to the optimizer's learning rate.
        warmup_starting_lr: The first learning rate of the warm-up.
        warmup_starting_lr_ratio: The same, as a fraction of the optimizer's learning rate.
        num_cooldown_epochs: Epochs at the end with the final learning rate.

    Raises:
        ValueError: No update is left between warm-up and cool-down.
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
        self.decay_end = self.total_updates - int(num_cooldown_epochs * num_update_steps_per_epoch)
        if self.decay_end <= self.warmup_updates:
            raise ValueError(
                f"no update is left between warm-up and cool-down; got {total_num_epochs} epochs, {num_warmup_epochs} of "
                f"warm-up and {num_cooldown_epochs} of cool-down. Shorten one of them."
            )
        self.k_decay, self.lr_min, self.min_lr_ratio = k_decay, lr_min, min_lr_ratio
        self.warmup_starting_lr, self.warmup_starting_lr_ratio = warmup_starting_lr, warmup_starting_lr_ratio
        self.step()

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the learning rate of each group after `num_updates` updates."""
        return [self._value(rate, num_updates) for rate in self.base_lr_values]

    def _value(self, rate: float, update: int) -> float:
        if update < self.warmup_updates:
            ratio = self.warmup_starting_lr_ratio
            start = self.warmup_starting_lr if ratio is None else ratio * rate
            return start + (rate - start) * update / self.warmup_updates
        end = self.lr_min if self.min_lr_ratio is None else self.min_lr_ratio * rate
        if update >= self.decay_end:
            return end
        passed, whole = update - self.warmup_updates, self.decay_end - self.warmup_updates
        return end + (rate - end) / 2 * (1 + math.cos(math.pi * (passed / whole) ** self.k_decay))

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: int = _EPOCHS,
        num_update_steps_per_epoch: int = _UPDATES,
        **arguments: Any,
    ) -> Callable[[Optimizer], CosineLrScheduler]:
        """Return a function for ``Trainer.train(create_scheduler_fn=...)``. By default the lengths are those of the run."""
        arguments |= {"total_num_epochs": total_num_epochs, "num_update_steps_per_epoch": num_update_steps_per_epoch}
        return partial(cls, **arguments)
