"""What a metric is in fastNLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch

from cadenza.compat.fastnlp.core.metrics.element import Aggregate, Element


class Metric(ABC):
    """The base of metrics of your own: `update` with what one batch gave, by name; then `get_metric`.

    The names of the arguments of `update` say which entries of the model's outputs and of the batch it gets. Numbers that it
    adds up are registered, so that they are reset, and added up over all ranks.

    It has ``compute`` as well, so a native `Evaluate` takes it.

    Args:
        backend: ``"auto"`` or ``"torch"``: there is no other here.
        aggregate_when_get_metric: Whether the ranks' numbers are made one before `get_metric`; None does so wherever there are
            several ranks.
    """

    def __init__(self, backend: Literal["auto", "torch"] = "auto", aggregate_when_get_metric: bool | None = None) -> None:
        if backend not in ("auto", "torch"):
            raise ValueError(f"backend must be 'auto' or 'torch'; got {backend!r}: Cadenza trains with torch")
        self.backend, self.aggregate_when_get_metric = backend, aggregate_when_get_metric

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, wrap in (("update", _noting), ("get_metric", _whole)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    @property
    def reduces_itself(self) -> bool:
        """Whether `get_metric` makes the ranks' numbers one, so that each rank need only see its own batches."""
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
        """Make ``self.<name>`` a number that is reset with the metric.

        Args:
            name: The attribute's name.
            value: Where it begins.
            aggregate_method: How the ranks' values become one; None leaves each rank its own.
            backend: For calls as fastNLP takes them; it makes no difference.
        """
        if hasattr(self, name):
            raise AttributeError(f"{type(self).__name__} has {name!r} already; give the element another name")
        self.elements[name] = Element(name, value, aggregate_method)
        return self.elements[name]

    @abstractmethod
    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Take what one batch gave."""

    @abstractmethod
    def get_metric(self) -> dict[str, Any]:
        """Return the result of all batches since the last `reset`.

        Raises:
            AssertionError: There was none.
        """

    def reset(self) -> None:
        """Forget all batches."""
        for element in self.elements.values():
            element.reset()
        vars(self)["_updated"] = False

    def compute(self) -> dict[str, Any]:
        """Return what `get_metric` does: by this name a native `Evaluate` asks for it."""
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
        elif element is not value:  # += gives the element itself
            element.value = value.value if isinstance(value, Element) else value


def _noting(update: Callable[..., Any]) -> Callable[..., Any]:
    """Note that there was a batch."""

    @wraps(update)
    def noting(self: Metric, *arguments: Any, **keywords: Any) -> Any:
        vars(self)["_updated"] = True
        return update(self, *arguments, **keywords)

    return noting


def _whole(get_metric: Callable[..., Any]) -> Callable[..., Any]:
    """Make the ranks' numbers one before, and give each rank its own back afterwards."""

    @wraps(get_metric)
    def whole(self: Metric) -> Any:
        if not vars(self).get("_updated"):
            raise AssertionError(f"{type(self).__name__}.get_metric was called before any update: there is no result")
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

    return whole
