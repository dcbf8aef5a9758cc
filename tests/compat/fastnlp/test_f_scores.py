"""F score, precision and recall, of classes and of spans. The values are those of fastNLP 1.0.1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza.compat.fastnlp import ClassifyFPreRecMetric, SpanFPreRecMetric, Vocabulary, logger
from cadenza.compat.fastnlp.core.metrics.span_f1_pre_rec_metric import spans_of

TARGET = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])
PRED = torch.tensor([0, 1, 1, 1, 2, 0, 2, 2])


def vocabulary(*tags: str, **options: Any) -> Vocabulary:
    """Return a vocabulary with these tags, from index 0 on."""
    return Vocabulary(**({"padding": None, "unknown": None} | options)).add_word_lst(list(tags))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"f": 0.625, "pre": 0.625, "rec": 0.625}),
        ({"f_type": "macro"}, {"f": 0.491667, "pre": 0.458333, "rec": 0.541667}),
        ({"f_type": "macro", "beta": 2}, {"f": 0.518939, "pre": 0.458333, "rec": 0.541667}),
        ({"beta": 0.5}, {"f": 0.625, "pre": 0.625, "rec": 0.625}),
    ],
)
@pytest.mark.parametrize("scores", [False, True])
def test_the_totals_of_a_classification(options: dict[str, Any], expected: dict[str, float], scores: bool) -> None:
    metric = ClassifyFPreRecMetric(**options)
    pred = torch.nn.functional.one_hot(PRED, 4).float() if scores else PRED
    metric.update(pred[:3], TARGET[:3])
    metric.update(pred[3:], TARGET[3:])
    assert metric.get_metric() == expected
    metric.reset()
    metric.update(TARGET, TARGET)
    assert metric.get_metric() == {"f": 1.0, "pre": 1.0, "rec": 1.0}


def test_each_class_has_its_own_results_with_its_name() -> None:
    metric = ClassifyFPreRecMetric(only_gross=False, tag_vocab=vocabulary("no", "yes", "maybe", "never"))
    metric.update(PRED, TARGET)
    results = metric.get_metric()
    assert {name: results[f"f-{name}"] for name in ("no", "yes", "maybe", "never")} == {
        "no": 0.5,
        "yes": 0.8,
        "maybe": 0.666667,
        "never": 0.0,
    }
    assert list(results)[-3:] == ["f", "pre", "rec"]
    plain = ClassifyFPreRecMetric(only_gross=False)
    plain.update(PRED, TARGET)
    assert list(plain.get_metric())[:6] == ["f-0", "pre-0", "rec-0", "f-1", "pre-1", "rec-1"]


def test_padding_does_not_count_but_its_class_is_one_for_the_mean() -> None:
    metric = ClassifyFPreRecMetric(f_type="macro")
    metric.update(torch.tensor([[1, 2, 0], [1, 0, 0]]), torch.tensor([[1, 2, 0], [1, 0, 0]]), torch.tensor([2, 1]))
    assert metric.get_metric() == {"f": 0.666667, "pre": 0.666667, "rec": 0.666667}


@pytest.mark.parametrize(
    ("encoding", "tags", "expected"),
    [
        ("bio", "B-a I-a O I-b I-a B-a", [("a", (0, 2)), ("b", (3, 4)), ("a", (4, 5)), ("a", (5, 6))]),
        ("bio", "I B O O I O I B O O", [("", (0, 1)), ("", (1, 2)), ("", (4, 5)), ("", (6, 7)), ("", (7, 8))]),
        ("bmes", "B E B S B M E M B E", [("", (0, 2)), ("", (2, 3)), ("", (3, 4)), ("", (4, 7)), ("", (7, 8)), ("", (8, 10))]),
        ("bmes", "M-8 S-2 B-6 E-5 B-7", [("8", (0, 1)), ("2", (1, 2)), ("6", (2, 3)), ("5", (3, 4)), ("7", (4, 5))]),
        ("bmeso", "B-a M-A O E-a S-a", [("a", (0, 2)), ("a", (3, 4)), ("a", (4, 5))]),
        ("bioes", "B-a I-a E-a E-a O S-b", [("a", (0, 3)), ("a", (3, 4)), ("b", (5, 6))]),
    ],
)
def test_tags_become_spans(encoding: str, tags: str, expected: Any) -> None:
    assert spans_of(tags.split(), encoding) == expected
    assert spans_of(tags.split(), encoding, ignore_labels=["a", ""]) == [span for span in expected if span[0] not in ("a", "")]


BIO = ("B-x", "I-x", "B-y", "I-y", "O")
SPANS = torch.tensor([[0, 1, 4, 2, 3], [2, 4, 0, 1, 4]])
FOUND = torch.tensor([[0, 1, 4, 2, 4], [0, 4, 0, 1, 4]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"f": 0.5, "pre": 0.5, "rec": 0.5}),
        ({"f_type": "macro"}, {"f": 0.4, "pre": 0.333333, "rec": 0.5}),
        ({"ignore_labels": ["y"]}, {"f": 0.8, "pre": 0.666667, "rec": 1.0}),
        ({"ignore_labels": ["y"], "beta": 2}, {"f": 0.909091, "pre": 0.666667, "rec": 1.0}),
        ({"encoding_type": "BIO"}, {"f": 0.5, "pre": 0.5, "rec": 0.5}),
    ],
)
@pytest.mark.parametrize("scores", [False, True])
def test_the_totals_of_spans(options: dict[str, Any], expected: dict[str, float], scores: bool) -> None:
    metric = SpanFPreRecMetric(vocabulary(*BIO), **options)
    metric.update(torch.nn.functional.one_hot(FOUND, 5).float() if scores else FOUND, SPANS, [5, 5])
    assert metric.get_metric() == expected


def test_each_label_has_its_own_results_and_later_elements_do_not_count() -> None:
    metric = SpanFPreRecMetric(vocabulary(*BIO), only_gross=False)
    metric.update(FOUND, SPANS, torch.tensor([3, 1]))
    assert metric.get_metric() == {
        "f-x": 0.666667,
        "pre-x": 0.5,
        "rec-x": 1.0,
        "f-y": 0.0,
        "pre-y": 0.0,
        "rec-y": 0.0,
        "f": 0.5,
        "pre": 0.5,
        "rec": 0.5,
    }


def test_without_any_span_the_results_are_zero() -> None:
    metric = SpanFPreRecMetric(vocabulary(*BIO), f_type="macro")
    metric.update(torch.tensor([[4]]), torch.tensor([[4]]))
    assert metric.get_metric() == {"f": 0.0, "pre": 0.0, "rec": 0.0}


@pytest.mark.parametrize("encoding", ["bio", "bmes", "bmeso", "bioes"])
def test_the_encoding_is_that_of_the_tags(encoding: str) -> None:
    tags = [letter if letter == "o" else f"{letter.upper()}-x" for letter in encoding]
    assert SpanFPreRecMetric(vocabulary(*tags)).encoding_type == encoding
    assert SpanFPreRecMetric(vocabulary(*tags, padding="<pad>", unknown="<unk>")).encoding_type == encoding


@pytest.mark.usefixtures("fresh_logger")
def test_arguments_that_do_not_fit_are_errors_or_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    logger.set_stdout("raw")
    with pytest.raises(RuntimeError, match=r"\['b', 'x'\], are not those of one of \['bio'"):
        SpanFPreRecMetric(vocabulary("B-x", "X-x"))
    with pytest.raises(AssertionError, match=r"encoding_type='bmes' has no tags that begin with \['i', 'o'\]"):
        SpanFPreRecMetric(vocabulary(*BIO), encoding_type="bmes")
    with pytest.raises(ValueError, match="f_type must be"):
        SpanFPreRecMetric(vocabulary(*BIO), f_type="mean")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tag_vocab must be a Vocabulary; got a dict"):
        SpanFPreRecMetric({0: "B"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tag_vocab must be a Vocabulary or None"):
        ClassifyFPreRecMetric({0: "B"})  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    SpanFPreRecMetric(vocabulary("B-x", "I-x", "O"), encoding_type="bioes", ignore_labels=["X"])
    ClassifyFPreRecMetric(ignore_labels=["x"])
    unused, upper, none = capsys.readouterr().out.splitlines()
    assert "tags that begin with 'es', which are not in tag_vocab" in unused
    assert "ignore_labels must be in lower case" in upper
    assert "ignore_labels of ClassifyFPreRecMetric has no effect" in none


@pytest.mark.parametrize(
    ("pred", "error"), [(torch.zeros(1, 3), RuntimeError), (torch.zeros(3), RuntimeError), (torch.zeros(1, 2, 1), ValueError)]
)
def test_shapes_that_do_not_fit_are_errors(pred: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        SpanFPreRecMetric(vocabulary(*BIO)).update(pred, torch.tensor([[4, 4]]), [2])
