"""The values that ``fit(override={...})`` gives to arguments of optimizers and schedules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cadenza.errors import nearest
from cadenza.optim.settings import Given, plain, set_option, set_rate, settings_of
from cadenza.status.counting import counted


class Group(NamedTuple):
    """A parameter group of an optimizer of the run."""

    number: int
    """Its index over all optimizers."""
    optimizer: Optimizer
    key: tuple[int, int]
    """The index of the optimizer, and the index of the group in it."""
    options: dict[str, Any]
    settings: dict[str, Any]
    """The plain arguments; see `settings_of`."""


def groups_of(optimizers: Sequence[Optimizer]) -> list[Group]:
    """Return the parameter groups of all optimizers, in order."""
    found: list[Group] = []
    for index, optimizer in enumerate(optimizers):
        for inner, (options, settings) in enumerate(zip(optimizer.param_groups, settings_of(optimizer), strict=True)):
            found.append(Group(len(found), optimizer, (index, inner), options, settings))
    return found


def give_values(given: Given, optimizers: Sequence[Optimizer]) -> None:
    """Set the given values in the optimizers, before a schedule or a checkpoint reads them. Other names are left alone.

    Raises:
        TypeError: A value has another type than the present one.
        ValueError: A value is out of range, there is a wrong number of values, or a group does not exist.
    """
    groups = groups_of(optimizers)
    for name, setting in given.values.items():
        value = _listed(setting)
        holders = [group for group in groups if name in group.settings]
        for group, one in (spread := _spread(name, value, holders)):
            before = group.settings[name]
            _check(name, one, before, group.optimizer)
            set_option(group.options, name, one)
            if name == "lr":
                set_rate(group.options, one)
            after = plain({name: one})[name]
            group.settings[name] = after
            given.note(f"{name} of group {group.number}" if len(groups) > 1 else name, before, after)
        for group, one in spread:
            if one is value and name in group.optimizer.defaults:  # for parameters that are added later
                group.optimizer.defaults[name] = group.options[name]
        if isinstance(value, Mapping):
            named = {group.key for group, _ in spread}
            given.kept |= {(*group.key, name) for group in holders if group.key not in named}


def _spread(name: str, value: Any, holders: Sequence[Group]) -> list[tuple[Group, Any]]:
    """Return the value for each parameter group: one for all, one for each, or those of the groups that a mapping names."""
    if not holders:
        return []
    if isinstance(value, Mapping):
        return [(_group(name, key, holders), one) for key, one in value.items()]
    each = isinstance(value, list | tuple)
    if isinstance(holders[0].settings[name], list):  # such as betas: only a list of lists has one for each group
        each = each and bool(value) and all(isinstance(one, list | tuple) for one in value)
    if not each:
        return [(group, value) for group in holders]
    if len(value) != len(holders):
        raise ValueError(
            f"override gives {name} {counted(len(value), 'value')}, but {counted(len(holders), 'parameter group')} of the "
            f"optimizers have it. Give one for all of them, {len(holders)} in a list, or a mapping of groups to values."
        )
    return [*zip(holders, value, strict=True)]


def _listed(value: Any) -> Any:
    """Return a value with lists for the sequences of a configuration library, such as Hydra's ``ListConfig``."""
    if isinstance(value, Mapping):
        return {key: _listed(one) for key, one in value.items()}
    foreign = isinstance(value, Sequence) and not isinstance(value, str | list | tuple)
    return [*map(_listed, value)] if foreign else value


def _group(name: str, key: object, holders: Sequence[Group]) -> Group:
    """Return the group that `key` names: an index over all optimizers, or the option ``name`` of a group."""
    for group in holders:
        if key == group.options.get("name") or (type(key) is int and key == group.number):
            return group
    known = [group.options.get("name", group.number) for group in holders]
    meant = nearest(key, [str(one) for one in known]) if isinstance(key, str) else ""
    raise ValueError(f"override gives {name} to the parameter group {key!r}, which does not exist.{meant} Use any of {known}.")


def _check(name: str, value: Any, before: Any, optimizer: Optimizer) -> None:
    """Raise `TypeError` or `ValueError` for a value that the optimizer cannot have."""
    if isinstance(before, list):
        if not isinstance(value, list | tuple) or len(value) != len(before) or not all(map(_is_number, value)):
            raise TypeError(
                f"override: {name} must be {counted(len(before), 'number')}, such as {tuple(before)}; got {value!r}"
            )
    elif isinstance(before, bool | str):
        if type(value) is not type(before):
            raise TypeError(f"override: {name} must be a {type(before).__name__}, such as {before!r}; got {value!r}")
    elif not _is_number(value):
        raise TypeError(f"override: {name} must be a finite number, such as {before!r}; got {value!r}")
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        options: dict[str, Any] = {"lr": 1e-3, name: tuple(value) if isinstance(before, list) else value}
        try:
            kind([nn.Parameter(torch.zeros(1))], **options)
        except ValueError as error:
            raise ValueError(f"override: {kind.__name__} does not take {name}={value!r}: {error}") from None
        except TypeError:  # an option of a group that the class does not take
            return


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -- schedules --------------------------------------------------------------------------------------


def schedule_given(given: Given, callback: str) -> Callable[..., Any] | None:
    """Return the function for the schedule of a callback that ``override={"scheduler": ...}`` gives; None without one.

    Raises:
        TypeError: It is no function.
    """
    value = given.values.get("scheduler")
    one = value.get(callback) if isinstance(value, Mapping) else value
    if one is not None and (not callable(one) or isinstance(one, LRScheduler)):
        raise TypeError(
            f"override: scheduler must be a function (optimizer) -> scheduler or (optimizer, total) -> scheduler; got {one!r}"
        )
    return one


def check_taken(given: Given, made_with: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise `ValueError` if a schedule does not have the given value of one of its arguments."""
    for name, value in _of_schedule(given.values, optimizer).items():
        if name in made_with and plain({name: value}).get(name) != made_with[name]:
            raise ValueError(
                f"override gives {name}={value!r}, but the {made_with['scheduler']} of this run cannot be made again with it. "
                "Give the whole schedule: override={'scheduler': function}."
            )


def _of_schedule(values: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the values that no argument of the optimizer has taken."""
    return {name: value for name, value in values.items() if name not in settings_of(optimizer)[0] and name != "scheduler"}


def with_arguments(scheduler: LRScheduler, values: Mapping[str, Any]) -> LRScheduler:
    """Return the scheduler, made again with other arguments; the same one if none of `values` is an argument of it.

    Raises:
        ValueError: The scheduler does not hold all of its arguments, or does not take a value.
    """
    parameters = inspect.signature(type(scheduler)).parameters
    names = [name for name in parameters if name not in ("optimizer", "last_epoch", "verbose")]
    values = _of_schedule(values, scheduler.optimizer)
    changes = {name: value for name, value in values.items() if name in names}
    if not changes:
        return scheduler
    kind = type(scheduler).__name__
    if missing := [name for name in names if not hasattr(scheduler, name)]:
        raise ValueError(
            f"override: {kind} does not keep its argument {missing[0]!r}, so it cannot be made again with "
            f"{', '.join(changes)}. Give the whole schedule: "
            f"override={{'scheduler': lambda optimizer: {kind}(optimizer, ...)}}."
        )
    held = {name: getattr(scheduler, name) for name in names}
    held = {name: sorted(one.elements()) if hasattr(one, "elements") else one for name, one in held.items()}  # milestones
    for group in scheduler.optimizer.param_groups:
        set_option(group, "lr", float(group.get("initial_lr", group["lr"])))
    try:
        return type(scheduler)(scheduler.optimizer, **{**held, **changes})
    except (TypeError, ValueError) as error:
        raise type(error)(f"override: {kind} does not take {changes}: {error}") from None
