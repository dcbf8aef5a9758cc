"""fastNLP's metrics: accuracy, metrics of one's own, the numbers that they register, and their sums over ranks."""

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
from cadenza.compat.fastnlp import Evaluator, Vocabulary, rank_zero_call
from cadenza.compat.fastnlp.core.metrics import (
    Accuracy,
    ClassifyFPreRecMetric,
    Element,
    Metric,
    SpanFPreRecMetric,
    TransformersAccuracy,
)
from cadenza.compat.fastnlp.core.metrics.backend import AutoBackend
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


def test_accuracy_counts_classes_and_scores_alike_over_all_batches() -> None:
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
        (lambda: Element("one", 1)[0], TypeError, "'one' is a number, and has no items"),
        (lambda: len(Element("one", 1)), TypeError, "'one' is a number, and has no items"),
        (lambda: Element("one", 1).__setitem__(0, 1), TypeError, "'one' is a number, and has no items"),
    ],
)
def test_wrong_uses_are_errors(use: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()


def test_a_custom_metric_accumulates_registered_numbers() -> None:
    fraction = Fraction()
    fraction.update(torch.tensor([1.0, -1.0]))
    fraction.update(torch.tensor([2.0, 3.0]))
    assert fraction.get_metric() == {"fraction": 0.75, "highest": 3.0}
    fraction.reset()
    assert (fraction.total.value, fraction.highest.value) == (0, -1.0)


def test_results_may_contain_registered_numbers() -> None:
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


def test_a_native_evaluation_accepts_a_metric() -> None:
    def judged(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": torch.ones(4, dtype=torch.long), "targets": torch.tensor([1, 1, 1, 0])}

    evaluate = Evaluate([torch.zeros(4, 1)], metrics={"acc": Accuracy()}, compute=judged)
    assert tiny_run(callbacks=[evaluate], epochs=1).history["eval/acc/acc"][0][1] == 0.75


# -- the numbers ------------------------------------------------------------------------------------------


def test_calculations_return_numbers() -> None:
    one, two = Element("one", 1), Element("two", 2)
    assert [one + two, 1 + two, two - one, 3 - two, two * 3, 3 * two] == [3, 3, 1, 1, 6, 6]
    assert [one / two, 1 / two, 5 // two, two // 2, 5 % two, two % 2, two**3, 3**two] == [0.5, 0.5, 2, 1, 1, 0, 8, 9]
    assert [-two, abs(-two), round(two / 3, 2), round(Element("x", 2.567), 1)] == [-2, 2, 0.67, 2.6]
    assert all(type(value) is float for value in (one + two, one / two, two * torch.tensor(3)))


def test_comparisons_return_booleans() -> None:
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


def test_the_methods_of_a_tensor_are_available() -> None:
    element, count = Element("one", 2.5), Element("count", 2**24)
    assert (element.item(), element.tolist(), element.shape, element.ndim, element.sum().item()) == (2.5, [2.5], (1,), 1, 2.5)
    assert (float(element), int(element), f"{element:.2f}") == (2.5, 2, "2.50")
    assert str(element) == "tensor([2.5000], dtype=torch.float64)"
    element.fill_value(3)
    element.to("cpu")
    assert (element.value.device.type, element.tensor2numpy().tolist(), element.log().item()) == ("cpu", [3.0], np.log(3))
    count += 1
    assert count.get_scalar() == 2**24 + 1  # counts stay exact


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


def test_it_can_be_copied_and_pickled() -> None:
    element = Element("one", [1, 2], "max", AutoBackend("torch"))
    for other in (copy.deepcopy(element), pickle.loads(pickle.dumps(element))):
        other += 1
        assert (other.to_list(), element.to_list(), other.name) == ([2, 3], [1, 2], "one")


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
    return Evaluator(Same(), rows, metrics, verbose=0).run()


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
    assert rank_zero_call(spans.all_gather_object)(rank) == (None if rank else [0]), "the other rank does not take part"
    driver = Evaluator(Same(), [], verbose=0).driver

    def exchanged() -> tuple[list[int], int]:
        driver.barrier()
        return driver.all_gather(rank), driver.broadcast_object(rank, src=1)

    assert rank_zero_call(exchanged)() == (None if rank else ([0], 0)), "the main process does not wait for the other"
    assert exchanged() == ([0, 1], 1)
    assert evaluated() == single, "each rank reads its shard, and no batch counts twice"


def test_numbers_are_aggregated_over_ranks_and_each_rank_keeps_its_own() -> None:
    single = evaluated()
    assert single["sums#own"] == single["sums#itself"]
    assert len(single["sums#own"]) == 5
    launch(lambda: counted(single))
