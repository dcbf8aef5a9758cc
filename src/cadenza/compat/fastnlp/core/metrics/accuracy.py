"""The accuracy of predictions."""

from __future__ import annotations

from typing import Any

import torch

from cadenza.compat.fastnlp.core.metrics.backend import Backend
from cadenza.compat.fastnlp.core.metrics.counts import classes_of
from cadenza.compat.fastnlp.core.metrics.metric import Metric
from cadenza.compat.fastnlp.core.utils.seq_len_to_mask import seq_len_to_mask


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

    def __init__(self, backend: str | Backend | None = "auto", aggregate_when_get_metric: bool | None = None) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        self.register_element("correct", 0, aggregate_method="sum")
        self.register_element("total", 0, aggregate_method="sum")

    def update(self, pred: Any, target: Any, seq_len: Any = None) -> None:
        """Add the predictions of one batch. The arguments are tensors or arrays.

        Args:
            pred: Classes, of the shape of `target`, or scores, with one more dimension at the end.
            target: The correct classes, shape (B,) or (B, L).
            seq_len: The length of each sample, shape (B,), if `target` has shape (B, L). Later elements do not count.

        Raises:
            RuntimeError: The shapes do not fit.
        """
        pred, target = classes_of(pred, target, padded=seq_len is None)
        right = pred == target
        if seq_len is not None and target.ndim > 1:
            inside = seq_len_to_mask(torch.as_tensor(seq_len, device=target.device), target.shape[1])
            self.total += inside.sum()
            self.correct += (right & inside).sum()
        else:
            self.total += target.numel()
            self.correct += right.sum()

    def get_metric(self) -> dict[str, Any]:
        """Return ``{"acc": ...}``, rounded to six digits."""
        return {"acc": round(self.correct.get_scalar() / (self.total.get_scalar() + 1e-12), 6)}


class TransformersAccuracy(Accuracy):
    """The accuracy, with the names that models of the transformers library use."""

    def update(self, logits: Any, labels: Any, attention_mask: Any = None) -> None:
        """Add the predictions of one batch.

        Args:
            logits: Scores, shape (B, C) or (B, L, C).
            labels: The correct classes, shape (B,) or (B, L).
            attention_mask: 1 inside of each sample and 0 in its padding, shape (B, L); None: no padding.
        """
        seq_len = None if attention_mask is None else attention_mask.sum(-1)
        super().update(pred=logits, target=labels, seq_len=seq_len)
