"""The accuracy of predictions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.metrics.metric import Metric

advise(__name__)


class Accuracy(Metric):
    """The fraction of correct predictions.

    Args:
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`.

    >>> accuracy = Accuracy()
    >>> accuracy.update(pred=torch.tensor([1, 0, 1]), target=torch.tensor([1, 1, 1]))
    >>> accuracy.get_metric()
    {'acc': 0.666667}
    """

    def __init__(self, backend: Literal["auto", "torch"] = "auto", aggregate_when_get_metric: bool | None = None) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        self.register_element("total_count", 0, aggregate_method="sum")
        self.register_element("correct_count", 0, aggregate_method="sum")

    def update(self, pred: Tensor, target: Tensor, seq_len: Tensor | None = None) -> None:
        """Add the predictions of one batch.

        Args:
            pred: Classes, of the shape of `target`, or scores, with one more dimension at the end.
            target: The correct classes, shape (B,) or (B, L).
            seq_len: The length of each sample, shape (B,), if `target` has shape (B, L). Later elements do not count.

        Raises:
            RuntimeError: The shapes do not fit.
        """
        if pred.ndim == target.ndim + 1 and pred.shape[:-1] == target.shape:
            pred = pred.argmax(-1)
        if pred.shape != target.shape:
            raise RuntimeError(
                f"pred must have the shape of target, or one more dimension at its end; got {tuple(pred.shape)} and "
                f"{tuple(target.shape)}"
            )
        right = pred == target
        if seq_len is not None and target.ndim > 1:
            inside = torch.arange(target.shape[1], device=target.device) < seq_len.to(target.device).unsqueeze(1)
            self.total_count += inside.sum()
            self.correct_count += (right & inside).sum()
        else:
            self.total_count += target.numel()
            self.correct_count += right.sum()

    def get_metric(self) -> dict[str, Any]:
        """Return ``{"acc": ...}``, rounded to six digits."""
        correct, total = self.correct_count.get_scalar(), self.total_count.get_scalar()
        return {"acc": round(correct / (total + 1e-12), 6)}
