"""The metrics of an evaluation, in all accepted forms, and the inputs of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """An object with ``update(predictions, targets)``, ``compute()`` and ``reset()``, as in torchmetrics.

    With named inputs, ``update`` receives these outputs instead, as positional arguments.
    """

    update: Callable[..., Any]
    compute: Callable[..., Any]
    reset: Callable[..., Any]


Metrics = Mapping[str, Any] | Sequence[Any] | Metric
"""A mapping by name; or a list, a torchmetrics ``MetricCollection`` or a single metric, named by class.

A tuple of a metric and names, ``(metric, "logits_a", "labels_a")``, stands for a metric that is updated with these outputs.
"""


@dataclass(frozen=True, slots=True, eq=False)  # a metric of torchmetrics returns another metric from ==
class Updated:
    """An object that is updated with each batch: a metric, or a collection of torchmetrics as a whole.

    So the compute groups of a collection share their states.
    """

    metric: Any
    inputs: tuple[str, ...]
    """The names of the outputs that ``update`` receives; none: the predictions and targets."""
    where: str
    """Its position in the argument, such as ``metrics['acc']``; for messages."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    name: str
    metric: Any
    updated: Updated


def by_name(metrics: Metrics | None) -> dict[str, Any]:
    """Return metrics by the name of their results.

    A metric without a name is named by its class, in snake case: ``MulticlassF1Score`` is ``multiclass_f1_score``. The metrics
    of a `MetricCollection` without a name have the names that they have there.

    Raises:
        TypeError: An object is not a metric.
        ValueError: Two metrics have the same name, or one metric has two names.

    >>> by_name(None)
    {}
    >>> by_name({"acc": 3})
    Traceback (most recent call last):
        ...
    TypeError: metrics['acc'] must have update, compute and reset, as torchmetrics have; got 3
    """
    named: dict[str, Any] = {}
    held: dict[int, str] = {}
    for entry in _entries(metrics, "", "metrics"):
        if entry.name in named:
            raise ValueError(
                f"two metrics have the name {entry.name!r}. Give a mapping, such as metrics={{'a': ..., 'b': ...}}"
            )
        if (other := held.setdefault(id(entry.metric), entry.name)) != entry.name:
            raise ValueError(
                f"the metrics {other!r} and {entry.name!r} are one object, which would be updated twice with each batch. "
                "Create a metric for each name."
            )
        named[entry.name] = entry.metric
    return named


def updated_together(metrics: Metrics | None) -> list[Updated]:
    """Return the objects to update, with their inputs."""
    unique = {id(entry.updated.metric): entry.updated for entry in _entries(metrics, "", "metrics")}
    return list(unique.values())


def share_states(metrics: Iterable[Any]) -> None:
    """Give each metric of a collection the state of its compute group. Call it after the last update."""
    for metric in metrics:
        if _is_collection(metric):
            metric.items(copy_state=False)


@contextmanager
def reduced_over(metrics: Iterable[Any], group: Any) -> Iterator[None]:
    """Return a context in which metrics of torchmetrics reduce over the ranks of a process group; None: over all."""
    modules = [part for one in metrics if group is not None and _is_torchmetrics(one) for part in one.modules()]
    set_here = [part for part in modules if getattr(part, "process_group", 0) is None]
    try:
        for part in set_here:
            part.process_group = group
        yield
    finally:
        for part in set_here:
            part.process_group = None


def check_state(metrics: Metrics | None) -> None:
    """Raise `TypeError` for a metric of which a checkpoint cannot hold the state."""
    for one in updated_together(metrics):
        if not all(callable(getattr(one.metric, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"{one.where} must have state_dict and load_state_dict, so that a run can continue inside of an interval; got "
                f"{one.metric!r}. Use a metric of torchmetrics, or add these methods."
            )


def state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric that was updated; of torchmetrics, also the parts that are not persistent."""
    if not _is_torchmetrics(metric):
        return {"state": metric.state_dict()}
    parts = [part for part in metric.modules() if hasattr(part, "_update_count")]
    for part in parts:
        part.persistent(True)
    return {"state": dict(metric.state_dict()), "updates": [part._update_count for part in parts]}


def load_state(metric: Any, state: Mapping[str, Any], device: Any) -> None:
    """Restore what `state_of` returned."""
    parts = [part for part in metric.modules() if hasattr(part, "_update_count")] if _is_torchmetrics(metric) else []
    for part in parts:
        part.persistent(True)
    metric.load_state_dict(state["state"])
    for part, count in zip(parts, state.get("updates", ()), strict=True):
        part._update_count, part._computed = count, None
    if hasattr(metric, "to"):
        metric.to(device)


def reduces_itself(metric: object) -> bool:
    """Return whether ``compute`` reduces over all ranks: torchmetrics, and metrics with ``reduces_itself = True``."""
    return bool(getattr(metric, "reduces_itself", False)) or _is_torchmetrics(metric)


def _entries(metrics: Any, name: str, where: str) -> Iterator[_Entry]:
    """Yield each metric with its name and the object to update; `where` is its position in the argument."""
    if metrics is None and not name:
        return
    if isinstance(metrics, Mapping) and not _is_torchmetrics(metrics):
        for key, part in metrics.items():
            if not isinstance(key, str):
                raise TypeError(f"the names of metrics must be strings; got {key!r}")
            yield from _entries(part, _path(name, key), f"{where}[{key!r}]")
        return
    if isinstance(metrics, list | tuple) and not _names_inputs(metrics):
        for index, part in enumerate(metrics):
            yield from _unnamed(part, name, f"{where}[{index}]")
        return
    if not name:
        yield from _unnamed(metrics, name, where)
        return
    updated = _updated(metrics, where)
    yield _Entry(name, updated.metric, updated)


def _unnamed(part: Any, name: str, where: str) -> Iterator[_Entry]:
    """Yield the metrics of a part that has no name of its own."""
    if isinstance(part, list | tuple | Mapping) and not _names_inputs(part) and not _is_torchmetrics(part):
        yield from _entries(part, name, where)
        return
    updated = _updated(part, where)
    if _is_collection(updated.metric):
        for key, metric in updated.metric.items():  # a ModuleDict
            yield _Entry(_path(name, key), metric, updated)
    else:
        yield _Entry(_path(name, _snake_case(type(updated.metric).__name__)), updated.metric, updated)


def _updated(part: Any, where: str) -> Updated:
    metric, inputs = (part[0], tuple(part[1:])) if _names_inputs(part) else (part, ())
    if isinstance(metric, type):
        raise TypeError(f"{where} is the class {metric.__name__}; expected an instance: {metric.__name__}(...)")
    if not isinstance(metric, Metric):
        raise TypeError(f"{where} must have update, compute and reset, as torchmetrics have; got {metric!r}{_hint(metric)}")
    return Updated(metric, inputs, where)


def _names_inputs(part: object) -> bool:
    """Return whether `part` is a metric with the names of its inputs."""
    return isinstance(part, tuple) and len(part) > 1 and all(isinstance(name, str) for name in part[1:])


def _hint(metric: object) -> str:
    if isinstance(metric, str):
        return ". Put the function into a class with these three methods, or use a metric of torchmetrics"
    if callable(metric):
        return (
            ". Return the number from compute, which then reports its weighted mean; or put the function into a class with "
            "these three methods, or use a metric of torchmetrics"
        )
    return ""


def _path(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def _snake_case(name: str) -> str:
    """Return the name of a class in snake case; ``BLEUScore`` is ``bleu_score``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.strip("_")).lower()


def _is_collection(metric: object) -> bool:
    return _is_torchmetrics(metric) and hasattr(metric, "items")


def _is_torchmetrics(metric: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).__mro__)
