"""The arguments that optimizers and schedules were made with, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

_NOT_SETTINGS = ("params", "param_names", "fused", "foreach", "initial_lr")
_SEEN: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


@dataclass(slots=True)
class Given:
    """Which settings count in a run that continues."""

    override: Sequence[str] = ()
    """The names of those for which the present values count."""
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    """By optimizer and group, the arguments that count; empty: those that the optimizers were made with."""


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return, by parameter group, the plain arguments that an optimizer was made with: as they were when it was first seen."""
    if optimizer not in _SEEN:
        _SEEN[optimizer] = [_settings(group) for group in optimizer.param_groups]
    return _SEEN[optimizer]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a schedule has changed the other
    return plain({name: value for name, value in {**group, **rate}.items() if name not in _NOT_SETTINGS})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some values that are numbers, strings or lists of them; tensors of one number become numbers."""
    named = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in named.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, bool | int | float | str) else None
