"""BLEU, the precision of the n-grams of a translation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cadenza.compat.fastnlp.core.metrics.backend import Backend
from cadenza.compat.fastnlp.core.metrics.metric import Metric
from cadenza.compat.fastnlp.core.metrics.texts import (
    References,
    Texts,
    Tokenizer,
    checked_tokenizer,
    paired,
    tokenizer_for,
)

__all__ = ["BLEU"]


class BLEU(Metric):
    """BLEU of all texts together (Papineni et al., 2002).

    Args:
        n_gram: The length of the longest n-grams.
        smooth: Add one to the counts of n-grams with more than one token.
        ngram_weights: The weight of each length; None: equal ones.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`.
        tokenizer_fn: Splits a text into tokens: a function, ``"en"`` for spaces, ``"cn"`` or ``"zh"`` for characters. None:
            characters if the first text contains Chinese ones.
        kwargs: Ignored, as in fastNLP.

    >>> metric = BLEU()
    >>> metric.update("the cat is on the mat", ["a cat is on the mat", "one cat is on the mat"])
    >>> metric.get_metric()
    {'bleu': 0.759836}
    """

    def __init__(
        self,
        n_gram: int = 4,
        smooth: bool = False,
        ngram_weights: Sequence[float] | None = None,
        backend: str | Backend | None = "auto",
        aggregate_when_get_metric: bool | None = None,
        tokenizer_fn: Tokenizer | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        if ngram_weights is not None and len(ngram_weights) != n_gram:
            raise ValueError(f"ngram_weights must have n_gram={n_gram} weights; got {len(ngram_weights)}")
        self.n_gram: int = n_gram
        self.smooth: bool = smooth
        self.ngram_weights: list[float] = [1 / n_gram] * n_gram if ngram_weights is None else list(ngram_weights)
        self.tokenizer_fn = checked_tokenizer(tokenizer_fn, "tokenizer_fn")
        for name in ("pred_len", "references_len"):
            self.register_element(name, 0, aggregate_method="sum")
        for name in ("precision_matches", "precision_total"):
            self.register_element(name, [0] * n_gram, aggregate_method="sum")

    def update(self, predictions: Texts, references: References) -> None:
        """Add texts.

        Args:
            predictions: One text, or a list of texts.
            references: The references of each text: a text, or a list of texts. For one prediction also a plain list.

        Raises:
            AssertionError: The numbers of predictions and of references differ.
        """
        for prediction, given in paired(predictions, references):
            if self.tokenizer_fn is None:
                self.tokenizer_fn = tokenizer_for(prediction)
            tokens = self.tokenizer_fn(prediction)
            each = [self.tokenizer_fn(reference) for reference in given]
            self.pred_len += len(tokens)
            self.references_len += len(min(each, key=lambda reference: abs(len(reference) - len(tokens))))
            self._count(tokens, each)

    def get_metric(self) -> dict[str, Any]:
        """Return ``{"bleu": ...}``, rounded to six digits; 0 if there is no match of one of the lengths."""
        matches, totals = self.precision_matches.to_list(), self.precision_total.to_list()
        if min(matches) == 0:
            return {"bleu": 0.0}
        logs = 0.0
        for length, (right, total, weight) in enumerate(zip(matches, totals, self.ngram_weights, strict=True), start=1):
            more = 1 if self.smooth and length > 1 else 0
            logs += weight * math.log((right + more) / (total + more))
        own, other = self.pred_len.get_scalar(), self.references_len.get_scalar()
        brevity = 1.0 if own >= other else math.exp(1 - other / own)
        return {"bleu": round(brevity * math.exp(logs), 6)}

    def _count(self, tokens: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        own, most = _n_grams(tokens, self.n_gram), Counter[tuple[str, ...]]()
        for reference in references:
            most |= _n_grams(reference, self.n_gram)
        for counts, element in ((own & most, self.precision_matches), (own, self.precision_total)):
            sums = [0] * self.n_gram
            for gram, count in counts.items():
                sums[len(gram) - 1] += count
            element += sums


def _n_grams(tokens: Sequence[str], longest: int) -> Counter[tuple[str, ...]]:
    return Counter(
        tuple(tokens[start : start + length]) for length in range(1, longest + 1) for start in range(len(tokens) - length + 1)
    )
