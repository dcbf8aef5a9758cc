"""Parts that several metrics use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cadenza.compat.fastnlp.core.log.logger import logger


def classes_of(pred: Any, target: Any, *, padded: bool) -> tuple[Tensor, Tensor]:
    """Return predictions as classes, of the shape of `target`, and `target`, on one device.

    Args:
        pred: Classes, or scores with one more dimension at the end: a tensor or an array.
        target: The correct classes.
        padded: Warn that elements of a padding count if `target` has more than one dimension.

    Raises:
        RuntimeError: The shapes do not fit.
    """
    pred, target = torch.as_tensor(pred), torch.as_tensor(target)
    if pred.ndim == target.ndim + 1 and pred.shape[:-1] == target.shape:
        pred = pred.argmax(-1)
        if padded and target.ndim > 1:
            logger.warning_once("a metric gets samples with several elements and no lengths, so it also counts the padding")
    if pred.shape != target.shape:
        raise RuntimeError(
            f"pred must have the shape of target, or one more dimension at its end; got {tuple(pred.shape)} and "
            f"{tuple(target.shape)}"
        )
    return pred, target.to(pred.device)


class Counts:
    """True positives, false positives and false negatives by class."""

    def __init__(self) -> None:
        self.tp: Counter[Any] = Counter()
        self.fp: Counter[Any] = Counter()
        self.fn: Counter[Any] = Counter()

    def clear(self) -> None:
        """Set all counts to zero."""
        for counter in (self.tp, self.fp, self.fn):
            counter.clear()

    def add(self, other: Counts) -> None:
        """Add the counts of another rank."""
        for own, given in ((self.tp, other.tp), (self.fp, other.fp), (self.fn, other.fn)):
            own.update(given)

    def results(self, *, beta: float, macro: bool, only_gross: bool, name_of: Callable[[Hashable], object]) -> dict[str, float]:
        """Return F, precision and recall, rounded to six digits.

        Args:
            beta: The weight of the recall: F is ``(1 + beta²) · pre · rec / (beta² · pre + rec)``.
            macro: The means of all classes; False: of the sums of the counts.
            only_gross: Omit the results of each class, ``f-name``, ``pre-name`` and ``rec-name``.
            name_of: The name of a class. A class without a name has no results of its own.
        """
        found = self.tp.keys() | self.fp.keys() | self.fn.keys()
        each = {label: self._scores(beta, label) for label in sorted(found)}
        results: dict[str, float] = {}
        for label, scores in each.items() if not only_gross else ():
            if any(counter[label] for counter in (self.tp, self.fp, self.fn)) and label != "":
                results |= {f"{key}-{name_of(label)}": score for key, score in zip(("f", "pre", "rec"), scores, strict=True)}
        if macro:
            totals = [sum(column) / len(each) for column in zip(*each.values(), strict=True)] or [0.0, 0.0, 0.0]
        else:
            totals = list(_scores(beta, self.tp.total(), self.fp.total(), self.fn.total()))
        results |= zip(("f", "pre", "rec"), totals, strict=True)
        return {key: round(score, 6) for key, score in results.items()}

    def _scores(self, beta: float, label: Hashable) -> tuple[float, float, float]:
        return _scores(beta, self.tp[label], self.fp[label], self.fn[label])


def _scores(beta: float, tp: int, fp: int, fn: int) -> tuple[float, float, float]:
    precision, recall = tp / (tp + fp + 1e-13), tp / (tp + fn + 1e-13)
    weight = beta**2
    return (1 + weight) * precision * recall / (weight * precision + recall + 1e-13), precision, recall
