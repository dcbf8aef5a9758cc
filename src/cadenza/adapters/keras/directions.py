"""Whether larger values of a metric are better, as Keras's callbacks with ``mode="auto"`` ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.run import Run

_UP = ("acc", "auc", "precision", "recall", "f1", "iou", "psnr", "r2")
_DOWN = ("loss", "error", "mae", "mse", "rmse", "perplexity")


class Directed:
    """A metric with its direction, by the names that Keras gives to them."""

    def __init__(self, name: str, direction: str) -> None:
        self.name: str = name
        self._direction: str = direction


def directed_metrics(run: Run, names: Iterable[str]) -> list[Any]:
    """Return Keras's container of metrics, with those of the evaluations and the names in the outputs.

    The direction is ``higher_is_better`` of the metric or, without it, follows from the name: ``accuracy`` and ``auc`` are
    better if larger, ``mae`` and ``error`` if smaller. Names that say neither are left out: Keras then asks for a ``mode``.
    """
    known = {
        name: getattr(one, "higher_is_better", None) for each in run.evaluations.values() for name, one in each.metrics.items()
    }
    for name in names:
        known.setdefault(name, None)
    directed = [
        Directed(name, "up" if better else "down") for name, one in known.items() if (better := _better(name, one)) is not None
    ]
    utils = sys.modules.get("keras.src.trainers.compile_utils")
    kind = getattr(utils, "MetricsList", None)
    return [kind(directed)] if kind is not None and directed else []


def _better(name: str, told: bool | None) -> bool | None:
    if isinstance(told, bool):
        return told
    parts = name.lower().replace("-", "_").replace("/", "_").split("_")
    if any(part.startswith(_UP) for part in parts):
        return True
    return False if any(part.startswith(_DOWN) for part in parts) else None
