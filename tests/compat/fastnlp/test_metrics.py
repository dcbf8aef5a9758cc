"""fastNLP's metrics: numbers and their sums over ranks; accuracy, F score, perplexity, BLEU and ROUGE as in fastNLP 1.0.1."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cadenza.callbacks import Evaluate
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import BLEU, ROUGE, ClassifyFPreRecMetric, Perplexity, SpanFPreRecMetric, Vocabulary, logger
from cadenza.compat.fastnlp.core.metrics import Accuracy, Element, Metric, TransformersAccuracy
from cadenza.compat.fastnlp.core.metrics.backend import AutoBackend
from cadenza.compat.fastnlp.core.metrics.span_f1_pre_rec_metric import spans_of
from cadenza.testing import launch, tiny_run


class Fraction(Metric):
    """The fraction of positive predictions, and the highest one."""

    positive: Any = 0
    highest: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_element("total", 0, aggregate_method="sum")
        self.register_element("highest", -1.0, aggregate_method="max")

    def update(self, pred: Tensor) -> None:
        self.total += len(pred)
        self.positive = self.positive + (pred > 0).sum()
        self.highest = torch.maximum(torch.as_tensor(self.highest.value), pred.max())

    def get_metric(self) -> dict[str, Any]:
        return {"fraction": float(self.positive / self.total), "highest": self.highest.get_scalar()}


def test_accuracy_counts_classes_and_scores_alike_over_all_batches_also_in_a_native_evaluation() -> None:
    accuracy = Accuracy()
    for _ in range(2):  # before the first batch, and after a reset
        with pytest.raises(AssertionError, match=r"Accuracy.get_metric was called before any update"):
            accuracy.get_metric()
        accuracy.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
        accuracy.update(torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]]), torch.tensor([1, 1, 0]))
        assert accuracy.get_metric() == {"acc": 0.8}
        accuracy.reset()
    accuracy.update(np.array([1, 0]), np.array([1, 1]), seq_len=None)
    assert accuracy.get_metric() == {"acc": 0.5}
    assert accuracy.tensor2numpy(torch.ones(2)).tolist() == accuracy.tensor2numpy(np.ones(2)).tolist() == [1, 1]
    accuracy.total = 2  # a registered number can be set
    accuracy.correct = accuracy.total * 0.5
    assert (accuracy.total.item(), accuracy.correct.tolist()) == (2, [1.0])

    def judged(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": torch.ones(4, dtype=torch.long), "targets": torch.tensor([1, 1, 1, 0])}

    evaluate = Evaluate([torch.zeros(4, 1)], metrics={"acc": Accuracy()}, compute=judged)
    assert tiny_run(callbacks=[evaluate], epochs=1).history["eval/acc/acc"][0][1] == 0.75


def test_padding_does_not_count() -> None:
    accuracy, named = Accuracy(), TransformersAccuracy()  # the second one takes the names of transformers
    target, lengths = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([2, 1])
    accuracy.update(torch.tensor([[1, 0, 0], [1, 1, 1]]), target, lengths)
    assert accuracy.get_metric() == {"acc": 0.666667}
    logits, labels = torch.tensor([[[0.1, 0.9], [0.9, 0.1], [0.9, 0.1]]]), torch.tensor([[1, 1, 0]])
    named.update(logits, labels, torch.tensor([[1, 1, 0]]))
    assert named.get_metric() == {"acc": 0.5}
    named.reset()
    named.update(logits[0], labels[0])
    assert named.get_metric() == {"acc": 0.666667}


def test_a_custom_metric_accumulates_registered_numbers_which_results_may_contain() -> None:
    fraction = Fraction()
    fraction.update(torch.tensor([1.0, -1.0]))
    fraction.update(torch.tensor([2.0, 3.0]))
    assert fraction.get_metric() == {"fraction": 0.75, "highest": 3.0}
    fraction.reset()
    assert (fraction.total.value, fraction.highest.value) == (0, -1.0)

    class Counting(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.register_element("count", 0)
            self.register_element("classes", [0, 0])
            self.texts: list[str] = []

        def update(self, number: int, text: str) -> None:
            self.count += 1
            self.classes[number] += 2
            self.texts.append(text)

        def get_metric(self) -> dict[str, Any]:
            return {"count": self.count, "inner": [self.classes], "texts": len(self.texts)}

        def reset(self) -> None:
            self.texts.clear()

    counting = Counting()
    counting.update(1, "a")
    results = counting.get_metric()
    counting.reset()
    assert results == {"count": 1, "inner": [[0, 2]], "texts": 1}
    assert (counting.count, counting.texts) == (0, []), "numbers are reset, although reset does not call the base class"


def test_calculations_return_numbers_and_comparisons_booleans() -> None:
    one, two = Element("one", 1), Element("two", 2)
    assert [one + two, 1 + two, two - one, 3 - two, two * 3, 3 * two] == [3, 3, 1, 1, 6, 6]
    assert [one / two, 1 / two, 5 // two, two // 2, 5 % two, two % 2, two**3, 3**two] == [0.5, 0.5, 2, 1, 1, 0, 8, 9]
    assert [-two, abs(-two), round(two / 3, 2), round(Element("x", 2.567), 1)] == [-2, 2, 0.67, 2.6]
    assert all(type(value) is float for value in (one + two, one / two, two * torch.tensor(3)))
    one, two = Element("one", 1), Element("two", 2)
    assert one < two
    assert two <= 2
    assert one == 1
    assert one != two
    assert not any((one > two, two >= 3, one == None, Element("zero", 0)))  # noqa: E711  # as users write it
    assert all(type(value) is bool for value in (one < two, one == 1, one != two))


@pytest.mark.parametrize("other", [4, 4.0, torch.tensor(4), torch.tensor([4.0]), np.float32(4), np.int64(4), Element("x", 4)])
def test_it_can_be_changed_by_any_number(other: Any) -> None:
    element = same = Element("one", 1)
    element += other
    element -= 1
    element *= other
    element /= 2
    assert element is same
    assert (element.get_scalar(), other + element, element + other) == (8, 12, 12)


def test_a_number_has_the_methods_of_a_tensor_and_can_be_copied_and_pickled() -> None:
    element, count = Element("one", 2.5), Element("count", 2**24)
    assert (element.item(), element.tolist(), element.shape, element.ndim, element.sum().item()) == (2.5, [2.5], (1,), 1, 2.5)
    assert (float(element), int(element), f"{element:.2f}") == (2.5, 2, "2.50")
    assert str(element) == "tensor([2.5000], dtype=torch.float64)"
    element.fill_value(3)
    element.to("cpu")
    assert (element.value.device.type, element.tensor2numpy().tolist(), element.log().item()) == ("cpu", [3.0], np.log(3))
    count += 1
    assert count.get_scalar() == 2**24 + 1  # counts stay exact
    element = Element("one", [1, 2], "max", AutoBackend("torch"))
    for other in (copy.deepcopy(element), pickle.loads(pickle.dumps(element))):
        other += 1
        assert (other.to_list(), element.to_list(), other.name) == ([2, 3], [1, 2], "one")


def test_a_list_has_items() -> None:
    element = Element("classes", [0, 1, 4], aggregate_method="sum", backend="torch")
    element[2] = 100
    element[0] += 3
    element += [1, 1, 1]
    element *= torch.tensor([1, 2, 1])
    assert (element.to_list(), element[1], len(element), element + element) == ([4, 4, 101], 4, 3, [8, 8, 202])
    assert (element == [4, 4, 101], element / 2) == ([True, True, True], [2, 2, 50.5])
    element.reset()
    assert element.plain() == [0, 1, 4]


# -- two ranks --------------------------------------------------------------------------------------------


class Several(Metric):
    """A number for each way to make the ranks' numbers one."""

    def __init__(self) -> None:
        super().__init__(aggregate_when_get_metric=True)
        for method in ("sum", "mean", "max", "min"):
            self.register_element(method, [0, 0], aggregate_method=method)
        self.register_element("own", 0)

    def update(self, value: float) -> None:
        for name in ("sum", "mean", "max", "min"):
            self.elements[name].value = [value, -value]
        self.own = value

    def get_metric(self) -> dict[str, Any]:
        return dict(self.elements)


class Inherited(Accuracy):
    """The accuracy in percent."""

    def get_metric(self) -> dict[str, Any]:
        return {"percent": super().get_metric()["acc"] * 100}


class Sums(Metric):
    """The sums of all batches, which the metric gathers itself; and their number, which is not aggregated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: list[int] = []
        self.register_element("batches", 0)

    def update(self, pred: Tensor) -> None:
        self.batches += 1
        self.sums.append(int(pred.sum()))

    def get_metric(self) -> dict[str, Any]:
        return {"sums": sorted(one for sums in self.all_gather_object(self.sums) for one in sums)}

    def reset(self) -> None:
        self.sums.clear()


class Same(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def evaluate_step(self, x: Tensor) -> dict[str, Tensor]:
        return {"pred": x.clone()}


TAGS = Vocabulary(padding=None, unknown=None).add_word_lst(["B-x", "I-x", "O"])


def evaluated() -> dict[str, Any]:
    """Return the results of an evaluation with metrics that gather, aggregate, or do neither."""
    generator = torch.Generator().manual_seed(0)
    rows = [{name: torch.randint(0, 3, (2, 5), generator=generator) for name in ("x", "target")} for _ in range(5)]
    metrics = {
        "span": SpanFPreRecMetric(TAGS),
        "class": ClassifyFPreRecMetric(f_type="macro"),
        "acc": Accuracy(),
        "own": Sums(),
        "itself": Sums(aggregate_when_get_metric=True),
    }
    return fastnlp.Evaluator(Same(), rows, metrics, verbose=0).run()


def counted(single: dict[str, Any]) -> None:
    """Compare metrics on one of two ranks with what both have."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    accuracy, alone, several = Accuracy(), Accuracy(aggregate_when_get_metric=False), Several()
    for metric in (accuracy, alone, inherited := Inherited()):
        metric.update(torch.tensor([1, rank]), torch.tensor([1, 1]))  # 1 of 2 on rank 0, 2 of 2 on rank 1
    assert accuracy.get_metric() == accuracy.get_metric() == {"acc": 0.75}
    assert (accuracy.correct, accuracy.total) == (rank + 1, 2), "each rank keeps its own"
    assert inherited.get_metric() == {"percent": 75}
    assert alone.get_metric() == {"acc": (0.5, 1.0)[rank]}
    several.update(rank + 1.0)
    assert several.get_metric() == {"sum": [3, -3], "mean": [1.5, -1.5], "max": [2, -1], "min": [1, -2], "own": rank + 1}

    spans, classes = SpanFPreRecMetric(TAGS), ClassifyFPreRecMetric(only_gross=False)
    spans.update(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, rank]]))  # two spans on rank 0, a longer one on rank 1
    assert spans.get_metric() == {"f": 0.4, "pre": 0.5, "rec": 0.333333}
    classes.update(torch.tensor([0, 1]), torch.tensor([0, rank]))
    assert classes.get_metric()["f-0"] == 0.8
    assert spans.all_gather_object(rank) == [0, 1]
    assert alone.all_gather_object(rank) == [rank]
    assert fastnlp.rank_zero_call(spans.all_gather_object)(rank) == (None if rank else [0]), "the other rank does not take part"
    driver = fastnlp.Evaluator(Same(), [], verbose=0).driver

    def exchanged() -> tuple[list[int], int]:
        driver.barrier()
        return driver.all_gather(rank), driver.broadcast_object(rank, src=1)

    assert fastnlp.rank_zero_call(exchanged)() == (None if rank else ([0], 0)), "the main process does not wait for the other"
    assert exchanged() == ([0, 1], 1)
    assert evaluated() == single, "each rank reads its shard, and no batch counts twice"


def test_numbers_are_aggregated_over_ranks_and_each_rank_keeps_its_own() -> None:
    single = evaluated()
    assert single["sums#own"] == single["sums#itself"]
    assert len(single["sums#own"]) == 5
    launch(lambda: counted(single))


# -- classes and spans -------------------------------------------------------------------------------------

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


def test_each_class_has_its_own_results_with_its_name_and_that_of_padding_is_one_for_the_mean() -> None:
    metric = ClassifyFPreRecMetric(only_gross=False, tag_vocab=vocabulary("no", "yes", "maybe", "never"))
    metric.update(PRED, TARGET)
    results = metric.get_metric()
    assert [results[f"f-{name}"] for name in ("no", "yes", "maybe", "never")] == [0.5, 0.8, 0.666667, 0.0]
    assert list(results)[-3:] == ["f", "pre", "rec"]
    plain = ClassifyFPreRecMetric(only_gross=False)
    plain.update(PRED, TARGET)
    assert list(plain.get_metric())[:6] == ["f-0", "pre-0", "rec-0", "f-1", "pre-1", "rec-1"]
    mean = ClassifyFPreRecMetric(f_type="macro")
    mean.update(torch.tensor([[1, 2, 0], [1, 0, 0]]), torch.tensor([[1, 2, 0], [1, 0, 0]]), torch.tensor([2, 1]))
    assert mean.get_metric() == {"f": 0.666667, "pre": 0.666667, "rec": 0.666667}


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
    x, y = {"f-x": 0.666667, "pre-x": 0.5, "rec-x": 1.0}, {"f-y": 0.0, "pre-y": 0.0, "rec-y": 0.0}
    assert metric.get_metric() == {**x, **y, "f": 0.5, "pre": 0.5, "rec": 0.5}
    none = SpanFPreRecMetric(vocabulary(*BIO), f_type="macro")
    none.update(torch.tensor([[4]]), torch.tensor([[4]]))
    assert none.get_metric() == {"f": 0.0, "pre": 0.0, "rec": 0.0}


@pytest.mark.parametrize("encoding", ["bio", "bmes", "bmeso", "bioes"])
def test_the_encoding_is_that_of_the_tags(encoding: str) -> None:
    tags = [letter if letter == "o" else f"{letter.upper()}-x" for letter in encoding]
    assert SpanFPreRecMetric(vocabulary(*tags)).encoding_type == encoding
    assert SpanFPreRecMetric(vocabulary(*tags, padding="<pad>", unknown="<unk>")).encoding_type == encoding


@pytest.mark.usefixtures("fresh_logger")
def test_arguments_without_effect_are_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    logger.set_stdout("raw")
    SpanFPreRecMetric(vocabulary("B-x", "I-x", "O"), encoding_type="bioes", ignore_labels=["X"])
    ClassifyFPreRecMetric(ignore_labels=["x"])
    unused, upper, none = capsys.readouterr().out.splitlines()
    assert "tags that begin with 'es', which are not in tag_vocab" in unused
    assert "ignore_labels must be in lower case" in upper
    assert "ignore_labels of ClassifyFPreRecMetric has no effect" in none


TOKENS = torch.tensor([[4, 4]])
SHAPE = r"pred must have shape \(B, L, V\)"
NO_ITEMS = "'one' is a number, and has no items"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: Accuracy().update(torch.zeros(2, 3), torch.zeros(3)), RuntimeError, r"got \(2, 3\) and \(3,\)"),
        (lambda: Accuracy().tensor2numpy([1]), ValueError, "got a list"),
        (lambda: Accuracy(backend="jittor"), ValueError, "backend"),
        (lambda: Fraction().register_element("total"), RuntimeError, "Fraction already has an attribute 'total'"),
        (lambda: Fraction().register_element("positive"), RuntimeError, "Fraction already has an attribute 'positive'"),
        (lambda: Fraction().register_element("x", 0, "median"), ValueError, "aggregate_method must be"),  # type: ignore[arg-type]
        (lambda: Fraction().nothing, AttributeError, "no attribute 'nothing'"),
        (lambda: Metric().update(), NotImplementedError, "Metric needs a method update"),
        (lambda: Element("one", 1).__iadd__(torch.ones(2)), ValueError, "'one' has 1 numbers; the result has 2"),
        (lambda: Element("one", 1).median_of, AttributeError, "no attribute 'median_of'"),
        (lambda: Element("one", 1)[0], TypeError, NO_ITEMS),
        (lambda: len(Element("one", 1)), TypeError, NO_ITEMS),
        (lambda: Element("one", 1).__setitem__(0, 1), TypeError, NO_ITEMS),
        (lambda: SpanFPreRecMetric(vocabulary("B-x", "X-x")), RuntimeError, r"\['b', 'x'\], are not those of one of \['bio'"),
        (lambda: bio(encoding_type="bmes"), AssertionError, r"encoding_type='bmes' has no tags that begin with \['i', 'o'\]"),
        (lambda: bio(f_type="mean"), ValueError, "f_type must be"),
        (lambda: SpanFPreRecMetric({0: "B"}), TypeError, "tag_vocab must be a Vocabulary; got a dict"),  # type: ignore[arg-type]
        (lambda: ClassifyFPreRecMetric({0: "B"}), TypeError, "tag_vocab must be a Vocabulary or None"),  # type: ignore[arg-type]
        (lambda: bio().update(torch.zeros(1, 3), TOKENS, [2]), RuntimeError, r"got \(1, 2\) and \("),
        (lambda: bio().update(torch.zeros(3), TOKENS, [2]), RuntimeError, r"got \(1, 2\) and \("),
        (
            lambda: bio().update(torch.zeros(1, 2, 1), TOKENS, [2]),
            ValueError,
            "pred has scores of 1 tags, but target contains the tag 4",
        ),
        (lambda: Perplexity(ignore_labels=["a"]), ValueError, "ignore_labels must be a whole number"),  # type: ignore[list-item]
        (lambda: Perplexity().update(torch.ones(2, 8), torch.ones(2, 8)), ValueError, SHAPE),
        (lambda: Perplexity().update(torch.ones(2, 8, 5), torch.ones(2, 8, 4)), ValueError, SHAPE),
        (lambda: Perplexity().update(torch.ones(2, 10, 5), torch.ones(2, 8)), ValueError, SHAPE),
        (lambda: ROUGE([1, 10, "W"]), ValueError, r"rouge_keys must be numbers from 1 to 9, or 'L'; got \[10, 'W'\]"),
        (lambda: ROUGE(accumulate="sum"), ValueError, "accumulate must be 'best' or 'avg'"),  # type: ignore[arg-type]
        (lambda: ROUGE(tokenizer="fr"), ValueError, "tokenizer must be a function, one of"),
        (lambda: BLEU(ngram_weights=[1, 1]), ValueError, "ngram_weights must have n_gram=4 weights; got 2"),
        (lambda: BLEU(tokenizer_fn=lambda: "ab"), TypeError, "too many positional arguments"),  # type: ignore[misc, arg-type]
        (lambda: BLEU().update(["a", "b"], ["a"]), AssertionError, "got 2 predictions and 1 references"),
    ],
)
def test_wrong_uses_arguments_and_shapes_are_errors(use: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()


def bio(**options: Any) -> SpanFPreRecMetric:
    return SpanFPreRecMetric(vocabulary(*BIO), **options)


# -- texts -------------------------------------------------------------------------------------------------

CAT, ONE = "the cat is on the mat", "a cat is on the mat"
TREE = "There is a big tree near the park here"


def test_perplexity_is_that_of_the_tokens_that_count() -> None:
    metric = Perplexity(ignore_labels=[-100, 4])
    pred = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 1, -100], [2, 4, 3]])
    metric.update(pred[:1], target[:1])
    metric.update(pred[1:], target[1:])
    chosen = torch.stack([pred[0, 0, 0], pred[0, 1, 1], pred[1, 0, 2], pred[1, 2, 3]])
    assert metric.get_metric()["perplexity"] == pytest.approx(float((-chosen.log().mean()).exp()), abs=1e-5)


@pytest.mark.parametrize("predictions", [CAT, [CAT]])
@pytest.mark.parametrize("references", [ONE, [ONE], [[ONE]], [ONE, "one cat is on the mat"], [[ONE, "one cat is on the mat"]]])
def test_bleu_of_one_text(predictions: Any, references: Any) -> None:
    metric = BLEU()
    metric.update(predictions, references)
    assert metric.get_metric() == {"bleu": 0.759836}


def test_bleu_of_several_texts_is_that_of_their_sums_short_ones_are_penalized_and_chinese_ones_split() -> None:
    metric = BLEU()
    metric.update([CAT, TREE], ["a cat is on the mat", "A big tree is growing near the park here"])
    assert metric.get_metric() == {"bleu": 0.522605}
    metric.reset()
    metric.update(TREE, "A big tree is growing near the park here")
    metric.update("The sun rises from the northeast with sunshine", "A fierce sun rises in the northeast with sunshine")
    metric.update("I was late for work today for the rainy", "I went to work too late today for the rainy")
    metric.update(CAT, ["a cat is on the mat", "one cat is in the mat", "cat is in mat", "a cat is on a blue mat"])
    assert metric.get_metric()["bleu"] == pytest.approx(0.4181, abs=1e-6)
    metric = BLEU(n_gram=2, smooth=True, ngram_weights=[1, 0])
    metric.update("the dog", "the old cat")
    assert metric.get_metric() == {"bleu": 0.0}
    metric.update("the old", "the old cat")
    assert metric.get_metric() == {"bleu": round(0.75 * 2.718281828**-0.5, 6)}
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
