"""The learning rate schedule WSD: warm-up, a stable phase, decay (https://arxiv.org/abs/2410.05192)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from cadenza.compat.accelerated.placeholders import Expression, TrainerPlaceholderValues
from cadenza.compat.accelerated.schedulers.scheduler_base import ScheduleError, StatefulSchedulerBase, check_keys, check_length

Length = int | TrainerPlaceholderValues | Expression

_EPOCHS, _UPDATES = TrainerPlaceholderValues.NUM_EPOCHS, TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH

_SETTINGS = (
    "total_steps",
    "num_warmup_steps",
    "decay_phase_ratio",
    "lr_min",
    "warmup_starting_lr",
    "use_inverse_sqrt_decay",
    "num_checkpoints",
    "checkpoint_steps",
    "is_continuation_from_checkpoint",
    "previous_checkpoint_step",
    "checkpoint_decay_info",
)
_GROUPS = ("param_group_field", "base_lr_values")
_SEVERAL = 1 / 3
"""The largest decay ratio with several checkpoints."""


class WSDLrScheduler(StatefulSchedulerBase):
    """Linear warm-up, then periods with a stable rate and a decay at their end. A period ends at a checkpoint.

    With one checkpoint, the only period is the whole training. With several, the first ends at a quarter of the training,
    and each further one at twice the step. After the last checkpoint the rate stays at its minimum: with two checkpoints,
    that is the second half of the training.

    With ``t`` from 0 to 1 during the decay, the rate is multiplied by ``lr_min + (1 - lr_min) * (1 - sqrt(t))``, or by
    ``1 / (t / lr_min + 1 - t)``.

    To train longer, create the schedule with ``is_continuation_from_checkpoint=True`` and load the state of a checkpoint.
    The schedule then begins a new training of `total_steps`, with the settings of that state and without a warm-up. To
    continue an interrupted training, see `resume`.

    Args:
        optimizer: The optimizer.
        num_epochs: The number of epochs.
        num_update_steps_per_epoch: The number of updates in an epoch of one process.
        total_steps: The number of updates, instead of the two above.
        num_warmup_steps: The number of updates in which the rate rises; None: 1 % of all updates.
        decay_phase_ratio: The part of a period in which the rate decays, from 0 to 1; up to 1/3 with several checkpoints.
        lr_min: The last rate of a decay, as a fraction of the optimizer's learning rate.
        warmup_starting_lr: The first learning rate of the warm-up.
        use_inverse_sqrt_decay: Whether to use the first of the two formulas; False uses the second.
        num_checkpoints: The number of periods.
        is_continuation_from_checkpoint: Whether the state that is loaded next is the beginning of a new training.

    Raises:
        ScheduleError: An argument is wrong.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_epochs: int | None = None,
        num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        num_warmup_steps: float | None = 0,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self.total_steps: int = _total(num_epochs, num_update_steps_per_epoch, total_steps)
        self.num_warmup_steps: int | float = int(0.01 * self.total_steps) if num_warmup_steps is None else num_warmup_steps
        self.decay_phase_ratio: float = decay_phase_ratio
        self.lr_min: float = lr_min
        self.warmup_starting_lr: float = warmup_starting_lr
        self.use_inverse_sqrt_decay: bool = use_inverse_sqrt_decay
        self.num_checkpoints = num_checkpoints
        self.is_continuation_from_checkpoint: bool = is_continuation_from_checkpoint
        self.previous_checkpoint_step: int | None = None
        """The last update before the latest decay; None before the first decay."""
        self._check()
        self._plan()

    def _check(self) -> None:
        several = self.num_checkpoints > 1
        largest = max(self.base_lr_values)
        wrong = {
            f"decay_phase_ratio must be from 0 to 1; got {self.decay_phase_ratio!r}": not 0 <= self.decay_phase_ratio <= 1,
            f"lr_min must be at least 0; got {self.lr_min!r}": self.lr_min < 0,
            "lr_min must be positive for use_inverse_sqrt_decay=False, which divides by it; got 0": (
                self.lr_min == 0 and not self.use_inverse_sqrt_decay
            ),
            f"num_checkpoints must be at least 1; got {self.num_checkpoints!r}": self.num_checkpoints < 1,
            f"decay_phase_ratio must be at most 1/3 with several checkpoints; got {self.decay_phase_ratio!r}": (
                several and self.decay_phase_ratio > _SEVERAL
            ),
            f"warmup_starting_lr must be at most the largest learning rate, {largest!r}; got {self.warmup_starting_lr!r}": (
                self.warmup_starting_lr > largest
            ),
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ScheduleError(message)

    def _plan(self) -> None:
        """Compute the periods from the length and the number of checkpoints."""
        self.checkpoint_steps: list[int] = estimate_checkpoint_steps(self.total_steps, self.num_checkpoints)
        self.checkpoint_decay_info: list[dict[str, int]] = []
        for start, end in zip([0, *self.checkpoint_steps], self.checkpoint_steps, strict=False):
            decay = int((end - start) * self.decay_phase_ratio)
            period = {"period_start": start, "period_end": end, "decay_steps": decay, "pre_decay_step": end - decay}
            self.checkpoint_decay_info.append(period)

    # -- the periods --------------------------------------------------------------------------------------

    def get_checkpoint_steps(self) -> list[int]:
        """Return the steps at which the periods end."""
        return self.checkpoint_steps

    def get_decay_info(self) -> list[dict[str, int]]:
        """Return ``period_start``, ``period_end``, ``decay_steps`` and ``pre_decay_step`` of each period."""
        return self.checkpoint_decay_info

    def get_phase_info(self, num_updates: int) -> dict[str, int]:
        """Return the period of a step. A period includes its last step; the last period includes all later steps."""
        infos = self.checkpoint_decay_info
        return next((period for period in infos if num_updates <= period["period_end"]), infos[-1])

    def get_current_step(self) -> int:
        """Return the counter: the number of calls of `step`, less one."""
        return self._num_updates

    def get_current_phase_info(self) -> dict[str, int]:
        """Return the period of the counter; see `get_phase_info`."""
        return self.get_phase_info(self._num_updates)

    # -- the rates ----------------------------------------------------------------------------------------

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the learning rate of each group after `num_updates` updates."""
        if num_updates < self.num_warmup_steps and not self.is_continuation_from_checkpoint:
            passed, start = num_updates / self.num_warmup_steps, self.warmup_starting_lr
            return [start + passed * (rate - start) for rate in self.base_lr_values]
        infos = self.checkpoint_decay_info
        period = next((info for info in infos if num_updates < info["period_end"]), None)
        if period is None:  # after the last checkpoint
            decays = any(info["decay_steps"] for info in infos)
            return [self._decayed(rate, 1.0) for rate in self.base_lr_values] if decays else self._stable()
        into_decay = num_updates - period["pre_decay_step"]
        if into_decay == -1 and not self.is_continuation_from_checkpoint:
            self.previous_checkpoint_step = num_updates
        if into_decay < 0:
            return self._stable()
        return [self._decayed(rate, into_decay / period["decay_steps"]) for rate in self.base_lr_values]

    def _stable(self) -> list[float]:
        return list(self.base_lr_values)

    def _decayed(self, rate: float, passed: float) -> float:
        if self.use_inverse_sqrt_decay:
            return rate * (self.lr_min + (1 - self.lr_min) * (1 - math.sqrt(passed)))
        return rate / (passed * (1.0 / self.lr_min) + (1.0 - passed) * 1.0)

    # -- states -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, with the keys of pytorch-accelerated, and the counter ``num_updates``, which it leaves out."""
        lists = {"checkpoint_steps": [*self.checkpoint_steps], "base_lr_values": [*self.base_lr_values]}
        infos = [dict(period) for period in self.checkpoint_decay_info]
        named = {name: getattr(self, name) for name in (*_GROUPS, *_SETTINGS)}
        return {**named, **lists, "checkpoint_decay_info": infos, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state. With ``is_continuation_from_checkpoint=True``, begin a new training with its settings instead.

        Raises:
            ScheduleError: Keys are missing or unknown; nothing is changed then.
        """
        if not self.is_continuation_from_checkpoint:
            self.resume(state_dict)
            return
        check_keys(self, state_dict, _SETTINGS, (*_GROUPS, "num_updates"))
        total = self.total_steps
        vars(self).update({name: value for name, value in state_dict.items() if name != "num_updates"})
        self.total_steps, self.is_continuation_from_checkpoint = total, True
        self._num_updates, self.previous_checkpoint_step = -1, None
        self._plan()

    def resume(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of an interrupted training, counter included, whether or not it was a continuation.

        Raises:
            ScheduleError: Keys are missing or unknown, or this schedule is the continuation of another training; nothing is
                changed then.
        """
        if "num_updates" not in state_dict and not set(_SETTINGS) - set(state_dict):
            raise ScheduleError(
                "the state has no 'num_updates', the position in the schedule: pytorch-accelerated does not save it. Create "
                "the schedule with is_continuation_from_checkpoint=True to begin a new training at this state, or add "
                "num_updates, the number of finished updates less one, to the state."
            )
        check_keys(self, state_dict, (*_SETTINGS, "num_updates"), _GROUPS)
        if self.is_continuation_from_checkpoint and not state_dict["is_continuation_from_checkpoint"]:
            raise ScheduleError(
                "a training cannot be resumed with is_continuation_from_checkpoint=True if it started without it. Pass False "
                "to continue it, or WSDCheckpointCallback(initial_checkpoint=...) to begin a new training at its state."
            )
        vars(self).update({name: value for name, value in state_dict.items() if name != "num_updates"})
        self._num_updates = state_dict["num_updates"]

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: Length = _EPOCHS,
        num_update_steps_per_epoch: Length = _UPDATES,
        num_warmup_epochs: float | None = None,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> Callable[[Optimizer], WSDLrScheduler]:
        """Return a function for ``Trainer.train(create_scheduler_fn=...)``. By default the lengths are those of the run.

        Args:
            total_num_epochs: The number of epochs.
            num_update_steps_per_epoch: The number of updates in an epoch of one process.
            num_warmup_epochs: The number of epochs in which the rate rises; None: 1 % of all updates.
            decay_phase_ratio: As in the class, like the following arguments.
        """
        warmup = None if num_warmup_epochs is None else num_update_steps_per_epoch * num_warmup_epochs
        lengths: dict[str, Any] = {
            "num_epochs": total_num_epochs,
            "num_update_steps_per_epoch": num_update_steps_per_epoch,
            "num_warmup_steps": warmup,
        }
        return partial(
            cls,
            **lengths,
            decay_phase_ratio=decay_phase_ratio,
            lr_min=lr_min,
            warmup_starting_lr=warmup_starting_lr,
            use_inverse_sqrt_decay=use_inverse_sqrt_decay,
            num_checkpoints=num_checkpoints,
            is_continuation_from_checkpoint=is_continuation_from_checkpoint,
        )


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int = 3) -> list[int]:
    """Return the steps of the checkpoints.

    >>> estimate_checkpoint_steps(1000, 1), estimate_checkpoint_steps(1000, 2), estimate_checkpoint_steps(1000, 9)
    ([1000], [250, 500], [250, 500, 1000])
    """
    if num_checkpoints == 1:
        return [total_steps]
    steps: list[int] = []
    while len(steps) < num_checkpoints and (not steps or steps[-1] < total_steps):
        steps.append(min(total_steps // 4 * 2 ** len(steps), total_steps))
    return steps


def _total(num_epochs: int | None, num_update_steps_per_epoch: int | None, total_steps: int | None) -> int:
    by_epochs = num_epochs is not None and num_update_steps_per_epoch is not None
    if by_epochs == (total_steps is not None):
        raise ScheduleError(
            "WSDLrScheduler needs either total_steps, or num_epochs and num_update_steps_per_epoch; got "
            f"{total_steps!r}, {num_epochs!r} and {num_update_steps_per_epoch!r}"
        )
    if total_steps is not None:
        check_length("total_steps", total_steps)
        return total_steps
    assert num_epochs is not None, "as checked"
    assert num_update_steps_per_epoch is not None, "as checked"
    check_length("num_epochs", num_epochs)
    check_length("num_update_steps_per_epoch", num_update_steps_per_epoch)
    return num_epochs * num_update_steps_per_epoch
