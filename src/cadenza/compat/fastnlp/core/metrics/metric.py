"""The base class of fastNLP's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

from cadenza.compat.fastnlp.core.metrics.backend import AutoBackend, Backend
from cadenza.compat.fastnlp.core.metrics.element import Aggregate, Element
from cadenza.compat.fastnlp.core.utils.nested import apply_to_collection
from cadenza.compat.fastnlp.envs.distributed import may_exchange


class Metric:
    """The base class of custom metrics: `update` with the values of a batch by name, then `get_metric`.

    The names of the arguments of `update` select entries of the model's outputs and of the batch. Register the numbers that the
    metric accumulates: they are reset, and aggregated over all ranks. Results may contain them.

    It has ``compute``, too, so a native `Evaluate` accepts it.

    Args:
        backend: ``"auto"`` or ``"torch"``.
        aggregate_when_get_metric: Whether `get_metric` aggregates over all ranks. None: if each number has an
            ``aggregate_method``. A metric that does not gets the data of all ranks in an evaluation.
    """

    _gathers: ClassVar[bool] = False
    """Whether `get_metric` collects objects with `all_gather_object`, even without registered numbers."""

    def __init__(self, backend: str | Backend | None = "auto", aggregate_when_get_metric: bool | None = None) -> None:
        self.backend: AutoBackend = AutoBackend(backend)
        self.aggregate_when_get_metric = aggregate_when_get_metric

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, wrap in (("update", _marking), ("get_metric", _aggregating), ("reset", _resetting)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    @property
    def reduces_itself(self) -> bool:
        """Whether `get_metric` aggregates over ranks, so that each rank updates only with its own batches."""
        flag: bool | None = vars(self).get("aggregate_when_get_metric")
        if flag is None:
            methods = [element.aggregate_method for element in self.elements.values()]
            return self._gathers or (bool(methods) and None not in methods)
        return flag

    @property
    def elements(self) -> dict[str, Element]:
        """The registered numbers."""
        kept: dict[str, Element] = vars(self).setdefault("_elements", {})
        return kept

    def register_element(
        self,
        name: str,
        value: float | Sequence[float] = 0,
        aggregate_method: Aggregate | None = None,
        backend: str | Backend = "auto",
    ) -> Element:
        """Register ``self.<name>`` as a number, or a list of numbers, that is reset with the metric.

        Args:
            name: The attribute's name.
            value: The initial value.
            aggregate_method: The aggregation over ranks; None keeps the value of each rank.
            backend: As in the constructor.

        Raises:
            RuntimeError: The metric has an attribute of this name already.
        """
        if hasattr(self, name):
            raise RuntimeError(f"{type(self).__name__} already has an attribute {name!r}. Choose another name.")
        self.elements[name] = Element(name, value, aggregate_method, backend)
        return self.elements[name]

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Add the values of one batch."""
        raise NotImplementedError(f"{type(self).__name__} needs a method update")

    def get_metric(self) -> dict[str, Any]:
        """Return the result of all batches since the last `reset`.

        Raises:
            AssertionError: There was no batch.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method get_metric")

    def reset(self) -> None:
        """Forget all batches. Registered numbers are always reset, even if a subclass does not call this."""
        _forget(self)

    def compute(self) -> dict[str, Any]:
        """Return the result of `get_metric`, for a native `Evaluate`."""
        return self.get_metric()

    def to(self, device: Any) -> None:
        """Move the registered numbers to a device."""
        for element in self.elements.values():
            element.to(device)

    def tensor2numpy(self, tensor: Any) -> Any:
        """Return a tensor, an array or a number as an array, or as a number.

        Raises:
            ValueError: It is something else.
        """
        return Backend().tensor2numpy(tensor)

    def all_gather_object(self, obj: Any, group: Any = None) -> list[Any]:
        """Return the objects of all ranks; only this rank's if `get_metric` does not aggregate. Every rank must call this.

        Args:
            obj: An object that can be pickled.
            group: The process group; None: all ranks.
        """
        return Backend().all_gather_object(obj, group) if self.reduces_itself else [obj]

    def set_auto_aggregate_when_get_metric(self, flag: bool) -> None:
        """Choose whether `get_metric` aggregates over all ranks."""
        self.aggregate_when_get_metric = flag

    @contextmanager
    def sync(self, recover: bool = True, aggregate: bool | None = False) -> Iterator[None]:
        """Inside, the registered numbers are the aggregation over all ranks. Every rank must enter.

        Args:
            recover: Restore each rank's numbers afterwards.
            aggregate: False: change nothing.
        """
        if not aggregate or not may_exchange():
            yield
            return
        own = {name: element.value for name, element in self.elements.items()}
        try:
            for element in self.elements.values():
                element.aggregate()
            yield
        finally:
            for name, value in own.items() if recover else ():
                self.elements[name].fill_value(value)

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
            element.value = value


def _forget(metric: Metric) -> None:
    for element in metric.elements.values():
        element.reset()
    vars(metric)["_updated"] = False


def _resetting(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Reset the registered numbers, too."""

    @wraps(reset)
    def resetting(self: Metric, *arguments: Any, **keywords: Any) -> Any:
        _forget(self)
        return reset(self, *arguments, **keywords)

    return resetting


def _marking(update: Callable[..., Any]) -> Callable[..., Any]:
    """Mark that there was a batch."""

    @wraps(update)
    def marking(self: Metric, *arguments: Any, **keywords: Any) -> Any:
        vars(self)["_updated"] = True
        return update(self, *arguments, **keywords)

    return marking


def _aggregating(get_metric: Callable[..., Any]) -> Callable[..., Any]:
    """Aggregate the numbers of all ranks before the call, restore each rank's own afterwards, and return plain numbers."""

    @wraps(get_metric)
    def aggregating(self: Metric, *arguments: Any, **keywords: Any) -> Any:
        state = vars(self)
        if not state.get("_updated"):
            raise AssertionError(f"{type(self).__name__}.get_metric was called before any update. Call update first.")
        if state.get("_in_get_metric"):  # a subclass calls the method of its base class
            return get_metric(self, *arguments, **keywords)
        state["_in_get_metric"] = True
        try:
            with self.sync(aggregate=self.reduces_itself):
                return apply_to_collection(get_metric(self, *arguments, **keywords), Element, Element.plain)
        finally:
            state["_in_get_metric"] = False

    return aggregating
