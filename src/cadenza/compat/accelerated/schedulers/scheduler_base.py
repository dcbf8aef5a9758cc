"""Base classes of schedules of a field of an optimizer's parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from cadenza.compat.absent import advise

advise(__name__)

Values = float | Sequence[float] | None


class SchedulerBase(ABC):
    """A schedule that is a function of the number of updates, without a counter of its own.

    Args:
        optimizer: The optimizer with the parameter groups.
        param_group_field: The scheduled field. Its current value is kept as ``initial_<field>``.

    Raises:
        KeyError: A parameter group has no such field.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        self.optimizer, self.param_group_field = optimizer, param_group_field
        for index, group in enumerate(optimizer.param_groups):
            if param_group_field not in group:
                raise KeyError(f"param_groups[{index}] has no {param_group_field!r}; it has {sorted(set(group) - {'params'})}")
            group.setdefault(f"initial_{param_group_field}", group[param_group_field])
        self.base_lr_values = [group[f"initial_{param_group_field}"] for group in optimizer.param_groups]

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> Values:
        """Return the values after `num_updates` updates: one for all groups, one for each, or None to change nothing."""

    def step_update(self, num_updates: int) -> None:
        """Set the values after `num_updates` updates."""
        self.update_param_groups(self.get_updated_values(num_updates))

    def update_param_groups(self, values: Values) -> None:
        """Set one value for all groups, or one for each group."""
        if values is None:
            return
        groups = self.optimizer.param_groups
        for group, value in zip(groups, values if isinstance(values, Sequence) else [values] * len(groups), strict=True):
            group[self.param_group_field] = value

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """A schedule with a counter: call `step` after each update."""

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count an update and set its values."""
        self._num_updates += 1
        self.step_update(self._num_updates)
