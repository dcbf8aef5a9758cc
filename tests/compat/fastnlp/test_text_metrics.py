"""Perplexity, BLEU and ROUGE. The values are those of fastNLP's own tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza.compat.fastnlp import BLEU, ROUGE, Perplexity

CAT = "the cat is on the mat"
TREE = "There is a big tree near the park here"


def test_perplexity_is_that_of_the_tokens_that_count() -> None:
    metric = Perplexity(ignore_labels=[-100, 4])
    pred = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 1, -100], [2, 4, 3]])
    metric.update(pred[:1], target[:1])
    metric.update(pred[1:], target[1:])
    chosen = torch.stack([pred[0, 0, 0], pred[0, 1, 1], pred[1, 0, 2], pred[1, 2, 3]])
    assert metric.get_metric()["perplexity"] == pytest.approx(float((-chosen.log().mean()).exp()), abs=1e-5)


@pytest.mark.parametrize("shapes", [((2, 8), (2, 8)), ((2, 8, 5), (2, 8, 4)), ((2, 10, 5), (2, 8))])
def test_perplexity_needs_probabilities_and_tokens(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"pred must have shape \(B, L, V\)"):
        Perplexity().update(torch.ones(shapes[0]), torch.ones(shapes[1], dtype=torch.long))
    with pytest.raises(ValueError, match="ignore_labels must be a whole number"):
        Perplexity(ignore_labels=["a"])  # type: ignore[list-item]


@pytest.mark.parametrize("predictions", [CAT, [CAT]])
@pytest.mark.parametrize(
    "references",
    [
        *("a cat is on the mat", ["a cat is on the mat"], [["a cat is on the mat"]]),
        *(["a cat is on the mat", "one cat is on the mat"], [["a cat is on the mat", "one cat is on the mat"]]),
    ],
)
def test_bleu_of_one_text(predictions: Any, references: Any) -> None:
    metric = BLEU()
    metric.update(predictions, references)
    assert metric.get_metric() == {"bleu": 0.759836}


def test_bleu_of_several_texts_is_that_of_their_sums() -> None:
    metric = BLEU()
    metric.update([CAT, TREE], ["a cat is on the mat", "A big tree is growing near the park here"])
    assert metric.get_metric() == {"bleu": 0.522605}
    more = ["one cat is in the mat", "cat is in mat", "a cat is on a blue mat"]
    metric.reset()
    metric.update(TREE, "A big tree is growing near the park here")
    metric.update("The sun rises from the northeast with sunshine", "A fierce sun rises in the northeast with sunshine")
    metric.update("I was late for work today for the rainy", "I went to work too late today for the rainy")
    metric.update(CAT, ["a cat is on the mat", *more])
    assert metric.get_metric()["bleu"] == pytest.approx(0.4181, abs=1e-6)


def test_bleu_without_long_matches_is_zero_and_short_texts_are_penalized() -> None:
    metric = BLEU(n_gram=2, smooth=True, ngram_weights=[1, 0])
    metric.update("the dog", "the old cat")
    assert metric.get_metric() == {"bleu": 0.0}
    metric.update("the old", "the old cat")
    assert metric.get_metric() == {"bleu": round(0.75 * 2.718281828**-0.5, 6)}


def test_chinese_texts_are_split_into_characters() -> None:
    metric = BLEU(n_gram=1)
    metric.update("猫在垫子上", "猫在那边的垫子")
    assert metric.pred_len == 5
    own = BLEU(n_gram=1, tokenizer_fn=lambda text: text.split("-"))
    own.update("a-b", "a-c")
    assert own.get_metric() == {"bleu": 0.5}


@pytest.mark.parametrize(("key", "expected"), [(1, 0.6382868885993958), (2, 0.4007352888584137), ("L", 0.6105090975761414)])
def test_rouge_is_the_mean_of_the_texts(key: int | str, expected: float) -> None:
    metric = ROUGE(rouge_keys=key)
    metric.update(
        [
            *("the cat is on the mats", "There is a big trees near the park here"),
            *("The sun rises from the northeast with sunshine", "I was later for work today for the rainy"),
        ],
        [
            *(["a cat is on the mating"], ["A big tree is growing near the parks here"]),
            *(["A fierce sunning rises in the northeast with sunshine"], ["I go to working too later today for the rainy"]),
        ],
    )
    assert metric.get_metric()[f"rouge{key}_fmeasure"] == pytest.approx(expected, abs=1e-7)


def test_several_references_give_the_best_one_or_the_mean() -> None:
    best, mean = ROUGE(1), ROUGE(1, accumulate="avg")
    for metric in (best, mean):
        metric.update("a b", ["a b", "c d"])
    assert best.get_metric() == {"rouge1_fmeasure": 1.0, "rouge1_precision": 1.0, "rouge1_recall": 1.0}
    assert mean.get_metric() == {"rouge1_fmeasure": 0.5, "rouge1_precision": 0.5, "rouge1_recall": 0.5}
    empty = ROUGE()
    empty.update("", "a")
    assert set(empty.get_metric().values()) == {0.0}


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"rouge_keys must be numbers from 1 to 9, or 'L'; got \[10, 'W'\]"):
        ROUGE([1, 10, "W"])
    with pytest.raises(ValueError, match="accumulate must be 'best' or 'avg'"):
        ROUGE(accumulate="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer must be a function, one of"):
        ROUGE(tokenizer="fr")
    with pytest.raises(ValueError, match="ngram_weights must have n_gram=4 weights; got 2"):
        BLEU(ngram_weights=[1, 1])
    with pytest.raises(TypeError):
        BLEU(tokenizer_fn=lambda: "ab")  # type: ignore[misc, arg-type]
    with pytest.raises(AssertionError, match="got 2 predictions and 1 references"):
        BLEU().update(["a", "b"], ["a"])
