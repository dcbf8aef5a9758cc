"""F score, precision and recall of a classification."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.metrics.backend import Backend
from cadenza.compat.fastnlp.core.metrics.counts import Counts, classes_of
from cadenza.compat.fastnlp.core.metrics.metric import Metric
from cadenza.compat.fastnlp.core.utils.seq_len_to_mask import seq_len_to_mask
from cadenza.compat.fastnlp.core.vocabulary import Vocabulary

__all__ = ["ClassifyFPreRecMetric"]


class FPreRec(Metric):
    """The common part of F score, precision and recall, of classes or of spans.

    Args:
        only_gross: Return only the totals; False: also ``f-name``, ``pre-name`` and ``rec-name`` of each class.
        f_type: ``"micro"`` adds the counts of all classes; ``"macro"`` returns the mean of the classes.
        beta: The weight of the recall; 1 weights precision and recall equally.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`; None aggregates.
    """

    _gathers: ClassVar[bool] = True

    def __init__(
        self,
        only_gross: bool,
        f_type: Literal["micro", "macro"],
        beta: float,
        backend: str | Backend | None,
        aggregate_when_get_metric: bool | None,
    ) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        if f_type not in ("micro", "macro"):
            raise ValueError(f"f_type must be 'micro' or 'macro'; got {f_type!r}")
        self.only_gross: bool = only_gross
        self.f_type = f_type
        self.beta: float = beta
        self._counts = Counts()

    def reset(self) -> None:
        """Forget all batches."""
        self._counts.clear()

    def get_metric(self) -> dict[str, Any]:
        """Return ``f``, ``pre`` and ``rec``, rounded to six digits. Every rank must call this."""
        whole = Counts()
        for counts in self.all_gather_object(self._counts):
            whole.add(counts)
        return whole.results(beta=self.beta, macro=self.f_type == "macro", only_gross=self.only_gross, name_of=self._name_of)

    def _name_of(self, label: Any) -> object:
        return label


class ClassifyFPreRecMetric(FPreRec):
    """F score, precision and recall of a classification.

    Args:
        tag_vocab: The vocabulary with the names of the classes; None: the names are their numbers.
        ignore_labels: No effect, as in fastNLP; a warning says so.
        only_gross: Return only the totals; False: also ``f-name``, ``pre-name`` and ``rec-name`` of each class.
        f_type: ``"micro"`` adds the counts of all classes; ``"macro"`` returns the mean of the classes, including those that
            occur only in the padding.
        beta: The weight of the recall; 1 weights precision and recall equally.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`; None aggregates.

    >>> metric = ClassifyFPreRecMetric(f_type="macro")
    >>> metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
    >>> metric.get_metric()
    {'f': 0.666667, 'pre': 0.75, 'rec': 0.75}
    """

    def __init__(
        self,
        tag_vocab: Vocabulary | None = None,
        ignore_labels: list[str] | None = None,
        only_gross: bool = True,
        f_type: Literal["micro", "macro"] = "micro",
        beta: float = 1,
        backend: str | Backend | None = "auto",
        aggregate_when_get_metric: bool | None = None,
    ) -> None:
        super().__init__(only_gross, f_type, beta, backend, aggregate_when_get_metric)
        if tag_vocab is not None and not isinstance(tag_vocab, Vocabulary):
            raise TypeError(f"tag_vocab must be a Vocabulary or None; got a {type(tag_vocab).__name__}")
        if ignore_labels:
            logger.warning("ignore_labels of ClassifyFPreRecMetric has no effect, as in fastNLP: all classes count")
        self.tag_vocab: Vocabulary | None = tag_vocab
        self.ignore_labels: list[str] | None = ignore_labels

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
        inside = torch.ones_like(target, dtype=torch.bool)
        if seq_len is not None and target.ndim > 1:
            inside = seq_len_to_mask(torch.as_tensor(seq_len, device=target.device), target.shape[-1])
        for label in torch.cat([pred.flatten(), target.flatten()]).unique().tolist():
            predicted, correct = (pred == label) & inside, (target == label) & inside
            self._counts.tp[label] += int((predicted & correct).sum())
            self._counts.fp[label] += int((predicted & ~correct).sum())
            self._counts.fn[label] += int((correct & ~predicted).sum())

    def _name_of(self, label: Any) -> object:
        return int(label) if self.tag_vocab is None else self.tag_vocab.to_word(label)
