"""ROUGE, the overlap of a summary and its references."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from typing import Any, Literal

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

__all__ = ["ROUGE"]

Scores = tuple[float, float, float]
"""F measure, precision, recall."""


class ROUGE(Metric):
    """ROUGE-N and ROUGE-L, the means over all texts.

    ROUGE-L adds the matching blocks of `difflib.SequenceMatcher`, as fastNLP does.

    Args:
        rouge_keys: The lengths of n-grams, 1 to 9, and ``"L"``: one of them, or several.
        use_stemmer: Compare the stems of tokens with more than three characters. Needs nltk.
        normalizer: Changes an English text before it is split; None: lower case, with spaces for all but letters and digits.
        tokenizer: Splits a text into tokens: a function, ``"en"`` for spaces, ``"cn"`` or ``"zh"`` for characters. None:
            characters if the first text contains Chinese ones.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`.
        accumulate: With several references, the ``"best"`` F measure or the mean, ``"avg"``.
        kwargs: Ignored, as in fastNLP.

    >>> metric = ROUGE(rouge_keys=1)
    >>> metric.update("the cat sat", "The cat!")
    >>> {name: round(value, 3) for name, value in metric.get_metric().items()}
    {'rouge1_fmeasure': 0.8, 'rouge1_precision': 0.667, 'rouge1_recall': 1.0}
    """

    def __init__(  # the signature is fastNLP's
        self,
        rouge_keys: Sequence[int | str] | int | str = (1, 2, "L"),
        use_stemmer: bool = False,
        normalizer: Callable[[str], str] | None = None,
        tokenizer: Tokenizer | str | None = None,
        backend: str | Backend | None = "auto",
        aggregate_when_get_metric: bool | None = None,
        accumulate: Literal["best", "avg"] = "best",
        **kwargs: Any,
    ) -> None:
        super().__init__(backend, aggregate_when_get_metric)
        keys = [rouge_keys] if isinstance(rouge_keys, int | str) else list(rouge_keys)
        if wrong := [key for key in keys if key != "L" and key not in range(1, 10)]:
            raise ValueError(f"rouge_keys must be numbers from 1 to 9, or 'L'; got {wrong}")
        if accumulate not in ("best", "avg"):
            raise ValueError(f"accumulate must be 'best' or 'avg'; got {accumulate!r}")
        self.rouge_keys: list[str | int] = keys
        self.accumulate = accumulate
        self.normalizer: Callable[[str], str] | None = normalizer
        self.stemmer: Any | None = _stemmer() if use_stemmer else None
        self.tokenizer = checked_tokenizer(tokenizer, "tokenizer")
        self.register_element("total_samples", 0, aggregate_method="sum")
        for name in ("fmeasure", "precision", "recall"):
            self.register_element(name, [0.0] * len(keys), aggregate_method="sum")

    def update(self, predictions: Texts, references: References) -> None:
        """Add texts.

        Args:
            predictions: One text, or a list of texts.
            references: The references of each text: a text, or a list of texts. For one prediction also a plain list.

        Raises:
            AssertionError: The numbers of predictions and of references differ.
        """
        for prediction, given in paired(predictions, references):
            if self.tokenizer is None:
                self.tokenizer = tokenizer_for(prediction)
            tokens = self._tokens(prediction)
            each = [self._tokens(reference) for reference in given]
            scores = [self._of_all([_score(key, tokens, reference) for reference in each]) for key in self.rouge_keys]
            self.total_samples += 1
            for element, values in zip((self.fmeasure, self.precision, self.recall), zip(*scores, strict=True), strict=True):
                element += list(values)

    def get_metric(self) -> dict[str, Any]:
        """Return ``rouge{key}_fmeasure``, ``rouge{key}_precision`` and ``rouge{key}_recall`` of each key."""
        count = self.total_samples.get_scalar()
        return {
            f"rouge{key}_{name}": getattr(self, name)[index] / count
            for index, key in enumerate(self.rouge_keys)
            for name in ("fmeasure", "precision", "recall")
        }

    def _tokens(self, text: str) -> list[str]:
        assert self.tokenizer is not None, "update chose it"
        if self.tokenizer is str.split:
            text = re.sub(r"[^a-z0-9]+", " ", text.lower()) if self.normalizer is None else self.normalizer(text)
        tokens = self.tokenizer(text)
        if self.stemmer is not None:
            tokens = [self.stemmer.stem(token) if len(token) > 3 else token for token in tokens]
        return [token for token in tokens if token]

    def _of_all(self, scores: list[Scores]) -> Scores:
        if self.accumulate == "best":
            return max([(0.0, 0.0, 0.0), *scores], key=lambda score: score[0])
        fmeasure, precision, recall = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return fmeasure, precision, recall


def _score(key: int | str, tokens: Sequence[str], reference: Sequence[str]) -> Scores:
    if key == "L":
        blocks = SequenceMatcher(None, tokens, reference).get_matching_blocks()
        return _of_counts(sum(block.size for block in blocks), len(tokens), len(reference))
    own, other = _n_grams(tokens, int(key)), _n_grams(reference, int(key))
    return _of_counts((own & other).total(), own.total(), other.total())


def _of_counts(matches: int, own: int, other: int) -> Scores:
    if not matches:
        return 0.0, 0.0, 0.0
    precision, recall = matches / own, matches / other
    return 2 * precision * recall / (precision + recall), precision, recall


def _n_grams(tokens: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1))


def _stemmer() -> Any:
    try:
        return import_module("nltk.stem.porter").PorterStemmer()
    except ImportError:
        raise ValueError("use_stemmer=True needs nltk, which is not installed. Install it: pip install nltk") from None
