"""A cosine learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch.optim import Optimizer

from cadenza.compat.accelerated.placeholders import Expression, TrainerPlaceholderValues
from cadenza.compat.accelerated.schedulers.scheduler_base import ScheduleError, StatefulSchedulerBase, check_keys, check_length

Length = int | TrainerPlaceholderValues | Expression

_EPOCHS, _UPDATES = TrainerPlaceholderValues.NUM_EPOCHS, TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH

_SETTINGS = (
    "total_iterations",
    "lr_min_ratio",
    "lr_min",
    "warmup_iterations",
    "warmup_lr_init",
    "warmup_lr_ratio",
    "k_decay",
    "num_cooldown_iterations",
)
"""The attributes in a state. Their names are those of pytorch-accelerated."""

_UNRELEASED = {
    "total_iterations": "total_updates",
    "lr_min_ratio": "min_lr_ratio",
    "lr_min": "lr_min",
    "warmup_iterations": "warmup_updates",
    "warmup_lr_init": "warmup_starting_lr",
    "warmup_lr_ratio": "warmup_starting_lr_ratio",
    "k_decay": "k_decay",
    "num_updates": "_num_updates",
}
"""Maps each key to its name in states of early Cadenza versions, which did not use pytorch-accelerated's names."""


class CosineLrScheduler(StatefulSchedulerBase):
    """Linear warm-up, cosine decay (Loshchilov and Hutter 2017), then a constant rate.

    The first update uses the optimizer's learning rate, or the start of the warm-up. See `StatefulSchedulerBase`. Without
    a warm-up the rates are those of pytorch-accelerated; see `as_original` for those with one.

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
        ScheduleError: A length is not positive, or `lr_min` is negative.
    """

    as_original: ClassVar[bool] = False
    """Set this to True, in the class or in a subclass, to reproduce pytorch-accelerated's rates after a warm-up as well.

    There, the decay ends as many updates early as the warm-up takes, with a jump to the final rate, and with
    `warmup_starting_lr_ratio` the warm-up rises above the optimizer's learning rate.
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
        check_length("total_num_epochs", total_num_epochs)
        check_length("num_update_steps_per_epoch", num_update_steps_per_epoch)
        if lr_min < 0:
            raise ScheduleError(f"lr_min must be at least 0; got {lr_min!r}")
        self.total_iterations: int = total_num_epochs * num_update_steps_per_epoch
        self.lr_min: float = lr_min
        self.lr_min_ratio: float | None = min_lr_ratio
        self.k_decay: float = k_decay
        self.warmup_iterations: float = num_warmup_epochs * num_update_steps_per_epoch
        self.warmup_lr_init: float = warmup_starting_lr
        self.warmup_lr_ratio: float | None = warmup_starting_lr_ratio
        self.num_cooldown_iterations: float = num_cooldown_epochs * num_update_steps_per_epoch
        if self.warmup_iterations:
            starts = [self.warmup_lr_init if self.as_original else self._warmup_start(rate) for rate in self.base_lr_values]
            self._update_param_groups(starts)

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the learning rate of each group after `num_updates` updates."""
        return [self._value(rate, num_updates) for rate in self.base_lr_values]

    def _value(self, rate: float, update: int) -> float:
        if update < self.warmup_iterations:
            start = self._warmup_start(rate)
            return start + update * ((rate - (self.warmup_lr_init if self.as_original else start)) / self.warmup_iterations)
        end = self.lr_min if self.lr_min_ratio is None else self.lr_min_ratio * rate
        whole = self.total_iterations - (self.warmup_iterations + self.num_cooldown_iterations)
        passed = update - self.warmup_iterations
        if (update if self.as_original else passed) >= whole:
            return end
        return end + 0.5 * (rate - end) * (1 + math.cos(math.pi * passed**self.k_decay / whole**self.k_decay))

    def _warmup_start(self, rate: float) -> float:
        return self.warmup_lr_init if self.warmup_lr_ratio is None else self.warmup_lr_ratio * rate

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: Length = _EPOCHS,
        num_update_steps_per_epoch: Length = _UPDATES,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> Callable[[Optimizer], CosineLrScheduler]:
        """Return a function for ``Trainer.train(create_scheduler_fn=...)``. By default the lengths are those of the run."""
        lengths: dict[str, Any] = {
            "total_num_epochs": total_num_epochs,
            "num_update_steps_per_epoch": num_update_steps_per_epoch,
        }
        return partial(
            cls,
            **lengths,
            k_decay=k_decay,
            lr_min=lr_min,
            min_lr_ratio=min_lr_ratio,
            num_warmup_epochs=num_warmup_epochs,
            warmup_starting_lr=warmup_starting_lr,
            warmup_starting_lr_ratio=warmup_starting_lr_ratio,
            num_cooldown_epochs=num_cooldown_epochs,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the counter ``num_updates``, with the keys of pytorch-accelerated."""
        return {**{name: getattr(self, name) for name in _SETTINGS}, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this class, or of pytorch-accelerated's.

        Raises:
            ScheduleError: Keys are missing or unknown; nothing is changed then.
        """
        state = _converted(state_dict) if "_num_updates" in state_dict else state_dict
        check_keys(self, state, (*_SETTINGS, "num_updates"))
        for name in _SETTINGS:
            setattr(self, name, state[name])
        self._num_updates = state["num_updates"]


def _converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state with old names to the current form. The resumed training keeps the rates of the interrupted one."""
    renamed = {key: state[earlier] for key, earlier in _UNRELEASED.items() if earlier in state}
    if "total_updates" in state and "decay_end" in state:
        renamed["num_cooldown_iterations"] = state["total_updates"] - state["decay_end"]
    return renamed
