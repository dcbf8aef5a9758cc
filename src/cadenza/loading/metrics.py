"""The metrics of an evaluation, in all accepted forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """An object with ``update(predictions, targets)``, ``compute()`` and ``reset()``, as in torchmetrics."""

    update: Callable[..., Any]
    compute: Callable[..., Any]
    reset: Callable[..., Any]


Metrics = Mapping[str, Any] | Sequence[Any] | Metric
"""A mapping by name; or a list, a torchmetrics ``MetricCollection`` or a single metric, named by class."""


def by_name(metrics: Metrics | None) -> dict[str, Any]:
    """Return metrics by name.

    Raises:
        TypeError: An object is not a metric.
        ValueError: Two metrics have the same name.

    >>> by_name(None)
    {}
    >>> by_name({"acc": 3})
    Traceback (most recent call last):
        ...
    TypeError: metrics['acc'] must have update, compute and reset, as torchmetrics have; got 3
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        for key, metric in metrics.items():
            if not isinstance(key, str):
                raise TypeError(f"the names of metrics must be strings; got {key!r}")
            _check(metric, f"metrics[{key!r}]")
        return dict(metrics)
    if not isinstance(metrics, list | tuple):
        if _is_collection(metrics):
            return dict(metrics.items())  # type: ignore[union-attr]  # a ModuleDict of torchmetrics
        _check(metrics, "metrics")
        return {type(metrics).__name__: metrics}
    named: dict[str, Any] = {}
    for index, metric in enumerate(metrics):
        _check(metric, f"metrics[{index}]")
        for name, one in by_name(metric).items():
            if name in named:
                raise ValueError(f"two metrics have the name {name!r}. Give a mapping, such as metrics={{'a': ..., 'b': ...}}")
            named[name] = one
    return named


def updated_together(metrics: Metrics | None) -> list[Any]:
    """Return the objects to update: each collection of torchmetrics as a whole, so that its compute groups share states."""
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    if isinstance(metrics, list | tuple):
        return [one for metric in metrics for one in updated_together(metric)]
    return [] if metrics is None else [metrics]


def share_states(metrics: Iterable[Any]) -> None:
    """Give each metric of a collection the state of its compute group. Call it after the last update."""
    for metric in metrics:
        if _is_collection(metric):
            metric.items(copy_state=False)


def reduces_itself(metric: object) -> bool:
    """Return whether ``compute`` reduces over all ranks: torchmetrics, and metrics with ``reduces_itself = True``."""
    return bool(getattr(metric, "reduces_itself", False)) or _is_torchmetrics(metric)


def _is_collection(metric: object) -> bool:
    return _is_torchmetrics(metric) and hasattr(metric, "items")


def _is_torchmetrics(metric: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).__mro__)


def _check(metric: object, what: str) -> None:
    if isinstance(metric, type):
        raise TypeError(f"{what} is the class {metric.__name__}; expected an instance: {metric.__name__}(...)")
    if not isinstance(metric, Metric):
        function = callable(metric) or isinstance(metric, str)
        hint = ". Put the function into a class with these three methods, or use a metric of torchmetrics" if function else ""
        raise TypeError(f"{what} must have update, compute and reset, as torchmetrics have; got {metric!r}{hint}")
