"""Schedules of any field of an optimizer's parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

Values = float | Sequence[float] | None


class SchedulerBase(ABC):
    """A schedule that is a function of the number of updates, and keeps no count of its own.

    Args:
        optimizer: Whose parameter groups are changed.
        param_group_field: What is changed in them; the value that each has now is kept as ``initial_<field>``.

    Raises:
        KeyError: A group has no such field.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        self.optimizer, self.param_group_field = optimizer, param_group_field
        for place, group in enumerate(optimizer.param_groups):
            if param_group_field not in group:
                raise KeyError(f"param_groups[{place}] has no {param_group_field!r}; it has {sorted(set(group) - {'params'})}")
            group.setdefault(f"initial_{param_group_field}", group[param_group_field])
        self.base_lr_values = [group[f"initial_{param_group_field}"] for group in optimizer.param_groups]

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> Values:
        """Return the value after so many updates: one for all groups, one for each, or None to leave them as they are."""

    def step_update(self, num_updates: int) -> None:
        """Set the values that belong to a number of updates."""
        self.update_param_groups(self.get_updated_values(num_updates))

    def update_param_groups(self, values: Values) -> None:
        """Set values: one for all groups, or one for each."""
        if values is None:
            return
        groups = self.optimizer.param_groups
        for group, value in zip(groups, values if isinstance(values, Sequence) else [values] * len(groups), strict=True):
            group[self.param_group_field] = value

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: all but the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """A schedule that counts updates itself: `step` is called after each. The first value is set when it is made."""

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count an update, and set the values that belong to it."""
        self._num_updates += 1
        self.step_update(self._num_updates)
