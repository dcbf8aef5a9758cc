"""The base class of fastNLP's metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.metrics.element import Aggregate, Element

advise(__name__)


class Metric(ABC):
    """The base class of custom metrics: `update` with the values of a batch by name, then `get_metric`.

    The names of the arguments of `update` select entries of the model's outputs and of the batch. Register the numbers that the
    metric accumulates: they are reset, and aggregated over all ranks.

    It has ``compute``, too, so a native `Evaluate` accepts it.

    Args:
        backend: ``"auto"`` or ``"torch"``.
        aggregate_when_get_metric: Whether to aggregate the numbers of all ranks before `get_metric`; None does so on several
            ranks.
    """

    def __init__(self, backend: Literal["auto", "torch"] = "auto", aggregate_when_get_metric: bool | None = None) -> None:
        if backend not in ("auto", "torch"):
            raise ValueError(f"backend must be 'auto' or 'torch'; got {backend!r}")
        self.backend, self.aggregate_when_get_metric = backend, aggregate_when_get_metric

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, wrap in (("update", _marking), ("get_metric", _aggregating)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    @property
    def reduces_itself(self) -> bool:
        """Whether `get_metric` aggregates over ranks, so that each rank updates only with its own batches."""
        methods = [element.aggregate_method for element in self.elements.values()]
        return self.aggregate_when_get_metric is not False and bool(methods) and None not in methods

    @property
    def elements(self) -> dict[str, Element]:
        """The registered numbers."""
        kept: dict[str, Element] = vars(self).setdefault("_elements", {})
        return kept

    def register_element(
        self, name: str, value: float = 0, aggregate_method: Aggregate | None = None, backend: str = "auto"
    ) -> Element:
        """Register ``self.<name>`` as a number that is reset with the metric.

        Args:
            name: The attribute's name.
            value: The initial value.
            aggregate_method: The aggregation over ranks; None keeps the value of each rank.
            backend: Ignored.
        """
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__} already has an attribute {name!r}. Choose another name.")
        self.elements[name] = Element(name, value, aggregate_method)
        return self.elements[name]

    @abstractmethod
    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Add the values of one batch."""

    @abstractmethod
    def get_metric(self) -> dict[str, Any]:
        """Return the result of all batches since the last `reset`.

        Raises:
            AssertionError: There was no batch.
        """

    def reset(self) -> None:
        """Forget all batches."""
        for element in self.elements.values():
            element.reset()
        vars(self)["_updated"] = False

    def compute(self) -> dict[str, Any]:
        """Return the result of `get_metric`, for a native `Evaluate`."""
        return self.get_metric()

    def __getattr__(self, name: str) -> Any:
        elements: dict[str, Element] = vars(self).get("_elements", {})
        if name in elements:
            return elements[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        element = vars(self).get("_elements", {}).get(name)
        if element is None:
            super().__setattr__(name, value)
        elif element is not value:  # += returns the element itself
            element.value = value.value if isinstance(value, Element) else value


def _marking(update: Callable[..., Any]) -> Callable[..., Any]:
    """Mark that there was a batch."""

    @wraps(update)
    def marking(self: Metric, *arguments: Any, **keywords: Any) -> Any:
        vars(self)["_updated"] = True
        return update(self, *arguments, **keywords)

    return marking


def _aggregating(get_metric: Callable[..., Any]) -> Callable[..., Any]:
    """Aggregate the numbers of all ranks before the call, and restore each rank's own afterwards."""

    @wraps(get_metric)
    def aggregating(self: Metric) -> Any:
        if not vars(self).get("_updated"):
            raise AssertionError(f"{type(self).__name__}.get_metric was called before any update. Call update first.")
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not many or self.aggregate_when_get_metric is False:
            return get_metric(self)
        own = {name: element.value for name, element in self.elements.items()}
        try:
            for element in self.elements.values():
                element.aggregate()
            return get_metric(self)
        finally:
            for name, value in own.items():
                self.elements[name].value = value

    return aggregating
