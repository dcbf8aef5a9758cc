"""A number that a metric adds up, on one rank or on all."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cadenza.compat.absent import advise

advise(__name__)

Aggregate = Literal["sum", "mean", "max", "min"]


class Element:
    """A value that stands for its number in sums and quotients. It stays on the device until it is asked for.

    Args:
        name: The metric's attribute.
        value: What `reset` goes back to.
        aggregate_method: How the ranks' values become one: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    """

    def __init__(self, name: str, value: float, aggregate_method: Aggregate | None) -> None:
        if aggregate_method not in ("sum", "mean", "max", "min", None):
            raise ValueError(f"aggregate_method must be 'sum', 'mean', 'max', 'min' or None; got {aggregate_method!r}")
        self.name, self.start, self.aggregate_method = name, value, aggregate_method
        self.value: Any = value

    def reset(self) -> None:
        """Begin anew."""
        self.value = self.start

    def get_scalar(self) -> float:
        """Return the value as a plain number."""
        value = self.value
        number: float = value.item() if isinstance(value, Tensor) else value
        return number

    def aggregate(self) -> None:
        """Make the ranks' values one. Every rank must call this."""
        method = self.aggregate_method
        if method is None:
            return
        whole = torch.as_tensor(self.value, dtype=torch.float64)
        operations = {"max": torch.distributed.ReduceOp.MAX, "min": torch.distributed.ReduceOp.MIN}
        torch.distributed.all_reduce(whole, operations.get(method, torch.distributed.ReduceOp.SUM))
        self.value = whole / torch.distributed.get_world_size() if method == "mean" else whole

    def __iadd__(self, other: Any) -> Element:
        self.value = self.value + _value(other)
        return self

    def __isub__(self, other: Any) -> Element:
        self.value = self.value - _value(other)
        return self

    def __add__(self, other: Any) -> Any:
        return self.value + _value(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.value

    def __sub__(self, other: Any) -> Any:
        return self.value - _value(other)

    def __rsub__(self, other: Any) -> Any:
        return other - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * _value(other)

    def __rmul__(self, other: Any) -> Any:
        return other * self.value

    def __truediv__(self, other: Any) -> Any:
        return self.value / _value(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"{self.name}: {self.value!r}"


def _value(other: Any) -> Any:
    return other.value if isinstance(other, Element) else other
