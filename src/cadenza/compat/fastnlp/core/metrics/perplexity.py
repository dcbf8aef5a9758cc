"""The perplexity of a language model."""

from __future__ import annotations

import math
from typing import Any

import torch

from cadenza.compat.fastnlp.core.metrics.backend import Backend
from cadenza.compat.fastnlp.core.metrics.metric import Metric

__all__ = ["Perplexity"]


class Perplexity(Metric):
    """The exponential of the mean negative log probability of the target tokens.

    Args:
        ignore_labels: Targets that do not count: a number or a list.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`.
        kwargs: Ignored, as in fastNLP.

    >>> metric = Perplexity(ignore_labels=-100)
    >>> metric.update(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]]), torch.tensor([[0, 0, -100]]))
    >>> metric.get_metric()
    {'perplexity': 2.828427}
    """

    def __init__(
        self,
        ignore_labels: int | list[int] | None = None,
        backend: str | Backend | None = "auto",
        aggregate_when_get_metric: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        labels = [ignore_labels] if isinstance(ignore_labels, int) else list(ignore_labels or ())
        if not all(isinstance(label, int) for label in labels):
            raise ValueError(f"ignore_labels must be a whole number, a list of them or None; got {ignore_labels!r}")
        self.ignore_labels: list[int] | None = labels or None
        self.register_element("total", 0.0, aggregate_method="sum")
        self.register_element("count", 0.0, aggregate_method="sum")

    def update(self, pred: Any, target: Any) -> None:
        """Add the predictions of one batch. The arguments are tensors or arrays.

        Args:
            pred: The probability of each token, shape (B, L, V), after softmax.
            target: The correct tokens, shape (B, L).

        Raises:
            ValueError: The shapes do not fit.
        """
        pred, target = torch.as_tensor(pred), torch.as_tensor(target)
        if pred.ndim != 3 or target.ndim != 2 or pred.shape[:2] != target.shape:
            raise ValueError(
                f"pred must have shape (B, L, V), and target shape (B, L); got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        target = target.to(pred.device)
        counts = torch.ones_like(target, dtype=torch.bool)
        for label in self.ignore_labels or ():
            counts &= target != label
        chosen = pred.gather(-1, target.where(counts, 0).unsqueeze(-1)).squeeze(-1)[counts]
        self.total += -chosen.log().sum()
        self.count += chosen.numel()

    def get_metric(self) -> dict[str, Any]:
        """Return ``{"perplexity": ...}``, rounded to six digits."""
        return {"perplexity": round(math.exp(self.total / self.count), 6)}
