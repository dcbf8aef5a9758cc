"""F score, precision and recall of the spans of a tagged sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.metrics.backend import Backend
from cadenza.compat.fastnlp.core.metrics.classify_f1_pre_rec_metric import FPreRec
from cadenza.compat.fastnlp.core.vocabulary import Vocabulary

__all__ = ["SpanFPreRecMetric"]

Span = tuple[str, tuple[int, int]]
"""A label, the first index, and the index after the last."""


class _Scheme(NamedTuple):
    """The first letters of tags that continue a span, and that can be continued; and those of tags outside of spans."""

    continuing: set[str]
    continued: set[str]
    outside: set[str]


_SCHEMES = {
    "bio": _Scheme({"i"}, {"b", "i"}, {"o"}),
    "bmes": _Scheme({"m", "e"}, {"b", "m"}, set()),
    "bmeso": _Scheme({"m", "e"}, {"b", "m"}, {"o"}),
    "bioes": _Scheme({"i", "e"}, {"b", "i"}, {"o"}),
}


class SpanFPreRecMetric(FPreRec):
    """F score, precision and recall of the spans of a tagged sequence, such as the names in a text.

    A predicted span is correct if it has the label, the begin and the end of a target span. Upper and lower case are equal.

    Args:
        tag_vocab: The vocabulary of the tags, such as ``B-name`` and ``O``, or ``B`` without labels.
        encoding_type: ``"bio"``, ``"bmes"``, ``"bmeso"`` or ``"bioes"``; None: the one with exactly the first letters of the
            tags.
        ignore_labels: Labels that do not count, in lower case.
        only_gross: Return only the totals; False: also ``f-label``, ``pre-label`` and ``rec-label`` of each label.
        f_type: ``"micro"`` adds the counts of all labels; ``"macro"`` returns the mean of the labels.
        beta: The weight of the recall; 1 weights precision and recall equally.
        backend: See `Metric`.
        aggregate_when_get_metric: See `Metric`; None aggregates.

    Raises:
        TypeError: `tag_vocab` is not a `Vocabulary`.
        AssertionError: A tag does not fit `encoding_type`.
        RuntimeError: `encoding_type` is None, and the tags fit none.

    >>> vocabulary = Vocabulary(padding=None, unknown=None).add_word_lst(["B-name", "I-name", "O"])
    >>> metric = SpanFPreRecMetric(vocabulary)
    >>> metric.update(torch.tensor([[0, 1, 2, 0]]), torch.tensor([[0, 1, 2, 2]]), seq_len=[4])
    >>> metric.get_metric()
    {'f': 0.666667, 'pre': 0.5, 'rec': 1.0}
    """

    def __init__(  # the signature is fastNLP's
        self,
        tag_vocab: Vocabulary,
        encoding_type: str | None = None,
        ignore_labels: Sequence[str] | None = None,
        only_gross: bool = True,
        f_type: Literal["micro", "macro"] = "micro",
        beta: float = 1,
        backend: str | Backend | None = "auto",
        aggregate_when_get_metric: bool | None = None,
    ) -> None:
        super().__init__(only_gross, f_type, beta, backend, aggregate_when_get_metric)
        if not isinstance(tag_vocab, Vocabulary):
            raise TypeError(f"tag_vocab must be a Vocabulary; got a {type(tag_vocab).__name__}")
        letters = {tag[:1].lower() for tag in tag_vocab.word2idx if tag not in (tag_vocab.padding, tag_vocab.unknown)}
        self.encoding_type: str = _encoding(letters) if not encoding_type else _checked(encoding_type.lower(), letters)
        if upper := [label for label in ignore_labels or () if label != label.lower()]:
            logger.warning(f"ignore_labels must be in lower case, because labels are compared in lower case; got {upper}")
        self.tag_vocab: Vocabulary = tag_vocab
        self.ignore_labels: Sequence[str] | None = ignore_labels

    def update(self, pred: Any, target: Any, seq_len: Any = None) -> None:
        """Add the predictions of one batch. The arguments are tensors or arrays.

        Args:
            pred: Tags, shape (B, L), or scores, shape (B, L, C).
            target: The correct tags, shape (B, L).
            seq_len: The length of each sample, shape (B,), also as a list. Later elements do not count. None: L.

        Raises:
            RuntimeError: The shapes do not fit.
            ValueError: A target is not one of the C tags.
        """
        pred, target = torch.as_tensor(pred), torch.as_tensor(target)
        if target.ndim != 2 or pred.shape[:2] != target.shape or pred.ndim > 3:
            raise RuntimeError(
                f"target must have shape (B, L), and pred shape (B, L) or (B, L, C); got {tuple(target.shape)} and "
                f"{tuple(pred.shape)}"
            )
        if pred.ndim == 3:
            if int(target.max()) >= pred.shape[-1]:
                raise ValueError(f"pred has scores of {pred.shape[-1]} tags, but target contains the tag {int(target.max())}")
            pred = pred.argmax(-1)
        lengths = [target.shape[1]] * len(target) if seq_len is None else [int(length) for length in seq_len]
        for predicted, correct, length in zip(pred.tolist(), target.tolist(), lengths, strict=True):
            self._count(self._spans(predicted[:length]), self._spans(correct[:length]))

    def _count(self, predicted: list[Span], correct: list[Span]) -> None:
        for span in predicted:
            if span in correct:
                correct.remove(span)
                self._counts.tp[span[0]] += 1
            else:
                self._counts.fp[span[0]] += 1
        for label, _ in correct:
            self._counts.fn[label] += 1

    def _spans(self, tags: Sequence[float]) -> list[Span]:
        names = [self.tag_vocab.to_word(int(tag)) for tag in tags]
        return spans_of(names, self.encoding_type, self.ignore_labels or ())


def spans_of(tags: Sequence[str], encoding_type: str, ignore_labels: Sequence[str] = ()) -> list[Span]:
    """Return the spans of a sequence of tags.

    A tag that continues no span of its label begins one.

    >>> spans_of(["B-name", "I-name", "O", "I-city"], "bio")
    [('name', (0, 2)), ('city', (3, 4))]
    """
    scheme = _SCHEMES[encoding_type]
    spans: list[Span] = []
    before = ""
    for index, tag in enumerate(tags):
        letter, label = tag[:1].lower(), tag[2:].lower()
        if letter in scheme.continuing and before in scheme.continued and label == spans[-1][0]:
            spans[-1] = (label, (spans[-1][1][0], index + 1))
        elif letter not in scheme.outside:
            spans.append((label, (index, index + 1)))
        before = letter
    return [span for span in spans if span[0] not in ignore_labels]


def _encoding(letters: set[str]) -> str:
    for name in _SCHEMES:
        if set(name) == letters:
            return name
    raise RuntimeError(
        f"the first letters of the tags, {sorted(letters)}, are not those of one of {list(_SCHEMES)}. Pass encoding_type."
    )


def _checked(name: str, letters: set[str]) -> str:
    if name not in _SCHEMES:
        raise ValueError(f"encoding_type must be one of {list(_SCHEMES)}; got {name!r}")
    if wrong := sorted(letters - set(name)):
        raise AssertionError(f"encoding_type={name!r} has no tags that begin with {wrong}. Check encoding_type.")
    if unused := "".join(letter for letter in name if letter not in letters):
        logger.warning(f"encoding_type={name!r} has tags that begin with {unused!r}, which are not in tag_vocab")
    return name
