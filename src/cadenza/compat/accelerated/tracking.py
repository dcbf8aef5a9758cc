"""``pytorch_accelerated.tracking``: the metrics of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cadenza.errors import nearest


class RunHistory(ABC):
    """Metrics by name, and the number of the current epoch, from 1. Subclass it to store them in another backend."""

    @abstractmethod
    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric, the oldest first."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the newest value of a metric."""

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Add a value to a metric."""

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Put `prefix` before the names of all metrics that are updated from now on."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """The current prefix."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Delete a metric."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The number of the current epoch, from 1. After the last epoch it is one more."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Count an epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Set the current epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Delete all metrics and restart at epoch 1."""


class InMemoryRunHistory(RunHistory):
    """Metrics in memory.

    >>> history = InMemoryRunHistory()
    >>> history.update_metric("accuracy", 0.5)
    >>> history.update_metric("accuracy", 0.7)
    >>> history.get_metric_values("accuracy"), history.get_latest_metric("accuracy"), history.current_epoch
    ([0.5, 0.7], 0.7, 1)
    """

    def __init__(self) -> None:
        self._metrics: defaultdict[str, list[Any]] = defaultdict(list)
        self._current_epoch = 1
        self._prefix = ""

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics."""
        return {name for name, values in self._metrics.items() if values}

    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric, the oldest first; empty if it was never updated. The list gets later values too."""
        return self._metrics.get(metric_name, [])

    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the newest value of a metric.

        Raises:
            ValueError: The metric was never updated.
        """
        if not self._metrics.get(metric_name):
            raise ValueError(
                f"the metric {metric_name!r} has no value.{nearest(metric_name, self._metrics)} The run history has "
                f"{', '.join(sorted(self._metrics)) or 'no metric'}. Pass eval_dataset for a metric of an evaluation; update a "
                "custom metric in a callback before this one."
            )
        return self._metrics[metric_name][-1]

    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Add a value to a metric."""
        self._metrics[self._prefix + metric_name].append(metric_value)

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Put `prefix` before the names of all metrics that are updated from now on. Names in reads are used unchanged."""
        self._prefix = prefix

    @property
    def metric_name_prefix(self) -> str:
        """The current prefix."""
        return self._prefix

    def delete_metric(self, metric_name: str) -> None:
        """Delete a metric.

        Raises:
            KeyError: There is no such metric.
        """
        del self._metrics[metric_name]

    @property
    def current_epoch(self) -> int:
        """The number of the current epoch, from 1. After the last epoch it is one more."""
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        """Delete all metrics and restart at epoch 1. The prefix stays."""
        self._metrics = defaultdict(list)
        self._current_epoch = 1


def plain_history(history: RunHistory) -> dict[str, Any]:
    """Return the state of a history for a checkpoint: numbers and tensors."""
    names = sorted(history.get_metric_names())
    return {
        "epoch": history.current_epoch,
        "metrics": {name: [as_python_number(value) for value in history.get_metric_values(name)] for name in names},
    }


def restore_history(history: RunHistory, state: Mapping[str, Any]) -> None:
    """Restore the state that `plain_history` returned."""
    history.reset()
    prefix = history.metric_name_prefix
    history.set_metric_name_prefix("")
    for name, values in state["metrics"].items():
        for value in values:
            history.update_metric(name, value)
    history.set_metric_name_prefix(prefix)
    history._set_epoch(state["epoch"])


def as_python_number(value: Any) -> Any:
    """Return a numpy scalar as a Python number, which needs no pickle; other values unchanged."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar and not isinstance(value, Tensor) else value


class LossTracker:
    """The mean loss over samples. `update` does not wait for the device.

    >>> tracker = LossTracker()
    >>> tracker.update(1.0, batch_size=3)
    >>> tracker.update(2.0, batch_size=1)
    >>> tracker.average, tracker.loss_value, tracker.running_count
    (1.25, 2.0, 4)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        self._last: float | Tensor = 0.0
        self._total: float | Tensor = 0.0
        self.running_count: int = 0
        """The number of samples so far."""

    def update(self, loss_batch_value: float | Tensor, batch_size: int = 1) -> None:
        """Add the mean loss of a batch. The loss of an empty batch does not count, even if it is NaN."""
        loss = loss_batch_value
        if isinstance(loss, Tensor):
            loss = loss.detach()
            loss = loss.double() if loss.device.type != "mps" else loss.float()
        self._last = loss
        if batch_size:
            self._total = self._total + loss * batch_size
        self.running_count += batch_size

    @property
    def latest(self) -> Tensor:
        """The loss of the last batch, shape (), without graph."""
        return torch.as_tensor(self._last, dtype=torch.float32).detach().clone()

    @property
    def loss_value(self) -> float:
        """The loss of the last batch. Waits for the device."""
        return float(self._last)

    @property
    def total_loss(self) -> float:
        """The sum over samples. Waits for the device."""
        return float(self._total)

    @property
    def average(self) -> float:
        """The mean over samples; 0 before the first. Waits for the device."""
        return self.total_loss / self.running_count if self.running_count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the device."""
        return {"last": self.loss_value, "total": self.total_loss, "count": self.running_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._last, self._total, self.running_count = state["last"], state["total"], state["count"]


def loss_of_rank(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> Mapping[str, Any]:
    """Return the state for the `LossTracker` of a rank, of the states of all ranks of the saved training.

    On another number of ranks, rank 0 gets their sum.

    >>> states = [{"last": 1.0, "total": 1.0, "count": 1}, {"last": 3.0, "total": 3.0, "count": 1}]
    >>> loss_of_rank(states, 1, 2)["total"], loss_of_rank(states, 0, 1)["total"], loss_of_rank(states, 2, 3)["total"]
    (3.0, 4.0, 0.0)
    """
    if len(states) == ranks:
        return states[rank]
    if rank:
        return LossTracker().state_dict()
    return {**states[0], "total": sum(state["total"] for state in states), "count": sum(state["count"] for state in states)}
