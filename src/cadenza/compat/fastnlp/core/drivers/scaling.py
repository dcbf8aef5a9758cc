"""``driver.grad_scaler`` and ``driver.tensor_to_numeric``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.optim.precision import Precision, Scaled

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "min": torch.min, "sum": torch.sum, "mean": torch.mean}


class LossScaler:
    """The loss scale of a precision, with the methods of ``torch.amp.GradScaler`` that callbacks call.

    At ``on_before_optimizers_step`` the gradients are unscaled. `unscale_` then does nothing.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return isinstance(self._precision, Scaled)

    def get_scale(self) -> float:
        """Return the loss scale; 1 without fp16."""
        return self._precision.scaler.get_scale() if isinstance(self._precision, Scaled) else 1.0

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a loss times the loss scale."""
        return self._precision.scaler.scale(outputs) if isinstance(self._precision, Scaled) else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, unless the update in progress has already done so."""
        if isinstance(self._precision, Scaled) and not self._precision.is_unscaled(optimizer):
            self._precision.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer unless a gradient is not finite."""
        if isinstance(self._precision, Scaled):
            self._precision.scaler.step(optimizer)
        else:
            optimizer.step()

    def update(self) -> None:
        """Set the loss scale for the next backward pass."""
        if isinstance(self._precision, Scaled):
            self._precision.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return self._precision.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self._precision.load_state_dict(state)


def reduced(value: Any, how: str | None) -> Any:
    """Return a nested value with plain numbers in place of tensors; see ``Driver.tensor_to_numeric``."""
    if how is not None and how not in _REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(map(repr, _REDUCTIONS))}, or None; got {how!r}")
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.item()
        return value.tolist() if how is None else _REDUCTIONS[how](value).item()
    if isinstance(value, Mapping):
        return {key: reduced(part, how) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(reduced(part, how) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(reduced(part, how) for part in value)
    return value
