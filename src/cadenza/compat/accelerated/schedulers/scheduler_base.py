"""Base classes of schedules of a field of an optimizer's parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsFloat

from torch.optim import Optimizer

Values = float | Sequence[float] | None


class ScheduleError(ValueError, AssertionError):
    """An argument or a state of a schedule is invalid. Also an ``AssertionError``, as in pytorch-accelerated."""


class SchedulerBase(ABC):
    """A schedule that is a function of the number of updates and has no counter.

    Args:
        optimizer: The optimizer with the parameter groups.
        param_group_field: The scheduled field. Its first value is kept as ``initial_<field>``, and a later schedule starts
            from that value again.

    Raises:
        KeyError: A parameter group has no such field.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"{type(self).__name__} needs an optimizer; got {optimizer!r}")
        self.optimizer: Optimizer = optimizer
        self.param_group_field: str = param_group_field
        self._initial_param_group_field = f"initial_{param_group_field}"
        for index, group in enumerate(optimizer.param_groups):
            if param_group_field not in group:
                raise KeyError(f"param_groups[{index}] has no {param_group_field!r}; it has {sorted(set(group) - {'params'})}")
            group.setdefault(self._initial_param_group_field, group[param_group_field])
        self.base_lr_values: list[Any] = [group[self._initial_param_group_field] for group in optimizer.param_groups]
        self._update_param_groups(self.base_lr_values)

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> Values:
        """Return the values after `num_updates` updates: one for all groups, one for each, or None to change nothing."""

    def step_update(self, num_updates: int) -> None:
        """Set the values after `num_updates` updates."""
        values = self.get_updated_values(num_updates)
        if values is not None:
            self._update_param_groups(values)

    def _update_param_groups(self, values: float | Sequence[float]) -> None:
        """Set one value for all groups, or one for each group."""
        groups = self.optimizer.param_groups
        each = values if isinstance(values, Sequence) else [values] * len(groups)
        if len(each) != len(groups):
            raise ScheduleError(
                f"get_updated_values of {type(self).__name__} must return one value for all groups or one for each of the "
                f"{len(groups)} groups; got {len(each)}"
            )
        for group, value in zip(groups, each, strict=True):
            group[self.param_group_field] = value

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """A schedule with a counter: call `step` after each update.

    The counter starts at -1. The first update uses the optimizer's own value, the second ``get_updated_values(0)``, the
    third ``get_updated_values(1)``.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count an update and set its values."""
        self._num_updates += 1
        self.step_update(self._num_updates)


def check_length(name: str, length: object) -> None:
    """Raise `ScheduleError` if a length of a schedule is not a number greater than 0."""
    if isinstance(length, bool) or not isinstance(length, SupportsFloat):
        raise ScheduleError(
            f"{name} must be a number; got {length!r}. Pass placeholders to create_scheduler_fn, not to the class"
        )
    if not float(length) > 0:
        raise ScheduleError(f"{name} must be positive; got {length!r}")


def check_keys(owner: object, state: Mapping[str, Any], required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise `ScheduleError` if a state lacks a required key, or has one that is neither required nor optional.

    Names of attributes are also allowed, because a subclass may add them to its state.
    """
    missing = sorted(set(required) - set(state))
    unknown = sorted(name for name in set(state) - set(required) - set(optional) if not hasattr(owner, name))
    if missing or unknown:
        raise ScheduleError(
            f"the state is not one of {type(owner).__name__}; it lacks {missing} and has the unknown keys {unknown}. "
            "Load it into a schedule of the class that saved it."
        )
