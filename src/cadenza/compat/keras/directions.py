"""``model.metrics``: the running means and directions of metrics, for callbacks with ``mode="auto"``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.run import Run

_UP = ("acc", "auc", "precision", "recall", "f1", "iou", "psnr", "r2")
_DOWN = ("loss", "error", "mae", "mse", "rmse", "perplexity")


class Directed:
    """A metric with Keras's attributes."""

    def __init__(self, name: str, direction: str, value: Any = None) -> None:
        self.name: str = name
        self._direction: str = direction
        self._value = value

    def result(self) -> Any:
        """Return the mean in the epoch so far; None for a metric that exists only in evaluations."""
        return self._value


def directed_metrics(run: Run, means: Mapping[str, Any]) -> list[Any]:
    """Return the loss and Keras's container of metrics, including evaluation metrics and the names in the outputs.

    The direction is ``higher_is_better`` of the metric or, without it, follows from the name: ``accuracy`` and ``auc`` are
    better if larger, ``mae`` and ``error`` if smaller. Other names are left out, so that Keras asks for a ``mode``.
    """
    metrics = {name: metric for evaluation in run.evaluations.values() for name, metric in evaluation.metrics.items()}
    known = {name: getattr(metric, "higher_is_better", None) for name, metric in metrics.items()}
    for name in means:
        known.setdefault(name, None)
    known.pop("loss", None)
    directed = [
        Directed(name, "up" if better else "down", means.get(name))
        for name, value in known.items()
        if (better := _better(name, value)) is not None
    ]
    utils = sys.modules.get("keras.src.trainers.compile_utils")
    kind = getattr(utils, "MetricsList", None)
    container = kind(directed, name="compile_metrics") if kind is not None and directed else None
    if container is not None:
        container.result = container.get_result
    return [Directed("loss", "down", means.get("loss")), *([] if container is None else [container])]


def _better(name: str, direction: bool | None) -> bool | None:
    if isinstance(direction, bool):
        return direction
    parts = name.lower().replace("-", "_").replace("/", "_").split("_")
    if any(part.startswith(_UP) for part in parts):
        return True
    return False if any(part.startswith(_DOWN) for part in parts) else None
