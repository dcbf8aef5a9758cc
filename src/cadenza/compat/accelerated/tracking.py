"""``pytorch_accelerated.tracking``: what a trainer remembers of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cadenza.errors import nearest


class RunHistory(ABC):
    """Metrics by name, and the number of the epoch under way, from 1. Derive from it to keep them elsewhere."""

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
        """The prefix in force."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Forget a metric."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The number of the epoch under way, from 1; after the last one it is one more."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Count an epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Go on at this epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all metrics, and begin at epoch 1."""


class InMemoryRunHistory(RunHistory):
    """Metrics in memory.

    >>> history = InMemoryRunHistory()
    >>> history.update_metric("accuracy", 0.5)
    >>> history.update_metric("accuracy", 0.7)
    >>> history.get_metric_values("accuracy"), history.get_latest_metric("accuracy"), history.current_epoch
    ([0.5, 0.7], 0.7, 1)
    """

    def __init__(self) -> None:
        self._metrics: dict[str, list[Any]] = {}
        self._current_epoch = 1
        self._prefix = ""

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics."""
        return set(self._metrics)

    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric, the oldest first; none if it was never updated."""
        return list(self._metrics.get(metric_name, ()))

    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the newest value of a metric.

        Raises:
            ValueError: It was never updated.
        """
        if metric_name not in self._metrics:
            raise ValueError(
                f"no value was recorded for the metric {metric_name!r}.{nearest(metric_name, self._metrics)} There is "
                f"{', '.join(sorted(self._metrics)) or 'none'}. A metric of an evaluation needs an eval_dataset; one of your "
                "own must be updated by a callback before this one."
            )
        return self._metrics[metric_name][-1]

    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Add a value to a metric."""
        self._metrics.setdefault(self._prefix + metric_name, []).append(metric_value)

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Put `prefix` before the names of all metrics that are updated from now on; it is no part of those that are read."""
        self._prefix = prefix

    @property
    def metric_name_prefix(self) -> str:
        """The prefix in force."""
        return self._prefix

    def delete_metric(self, metric_name: str) -> None:
        """Forget a metric.

        Raises:
            KeyError: There is none of this name.
        """
        del self._metrics[metric_name]

    @property
    def current_epoch(self) -> int:
        """The number of the epoch under way, from 1; after the last one it is one more."""
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        """Forget all metrics, and begin at epoch 1; the prefix stays."""
        self._metrics = {}
        self._current_epoch = 1


def plain_history(history: RunHistory) -> dict[str, Any]:
    """Return what a checkpoint must hold of a history: numbers, and tensors as they are."""
    names = sorted(history.get_metric_names())
    return {
        "epoch": history.current_epoch,
        "metrics": {name: [plain(value) for value in history.get_metric_values(name)] for name in names},
    }


def restore_history(history: RunHistory, state: Mapping[str, Any]) -> None:
    """Put back what `plain_history` returned."""
    history.reset()
    prefix = history.metric_name_prefix
    history.set_metric_name_prefix("")
    for name, values in state["metrics"].items():
        for value in values:
            history.update_metric(name, value)
    history.set_metric_name_prefix(prefix)
    history._set_epoch(state["epoch"])


def plain(value: Any) -> Any:
    """Return numpy's numbers as Python's, which can be saved and read back without pickle; other values as they are."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar and not isinstance(value, Tensor) else value


class LossTracker:
    """The mean loss over samples; adding to it does not wait for the device.

    >>> tracker = LossTracker()
    >>> tracker.update(1.0, batch_size=3)
    >>> tracker.update(2.0, batch_size=1)
    >>> tracker.average, tracker.loss_value, tracker.running_count
    (1.25, 2.0, 4)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._last: float | Tensor = 0.0
        self._total: float | Tensor = 0.0
        self.running_count = 0
        """Samples so far."""

    def update(self, loss: float | Tensor, batch_size: int = 1) -> None:
        """Add the mean loss of a batch; that of an empty one counts for nothing, also if it is NaN."""
        if isinstance(loss, Tensor):
            loss = loss.detach()
            loss = loss.double() if loss.device.type != "mps" else loss.float()
        self._last = loss
        if batch_size:
            self._total = self._total + loss * batch_size
        self.running_count += batch_size

    @property
    def loss_value(self) -> float:
        """The last batch's loss. Waits for the device."""
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
        """Return what a checkpoint must hold."""
        return {"last": self.loss_value, "total": self.total_loss, "count": self.running_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._last, self._total, self.running_count = state["last"], state["total"], state["count"]
