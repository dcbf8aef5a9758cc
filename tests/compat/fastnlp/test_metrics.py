"""fastNLP's metrics: accuracy, and metrics of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from cadenza.callbacks import Evaluate
from cadenza.compat.fastnlp import Evaluator, Vocabulary, rank_zero_call
from cadenza.compat.fastnlp.core.metrics import (
    Accuracy,
    ClassifyFPreRecMetric,
    Metric,
    SpanFPreRecMetric,
    TransformersAccuracy,
)
from cadenza.testing import tiny_run


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
    accuracy.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
    accuracy.update(torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]]), torch.tensor([1, 1, 0]))
    assert accuracy.get_metric() == {"acc": 0.8}
    accuracy.reset()
    accuracy.update(torch.tensor([1, 0, 0]), torch.tensor([1, 1, 1]))
    assert accuracy.get_metric() == {"acc": 0.333333}


def test_padding_does_not_count() -> None:
    accuracy = Accuracy()
    target, lengths = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([2, 1])
    accuracy.update(torch.tensor([[1, 0, 0], [1, 1, 1]]), target, lengths)
    assert accuracy.get_metric() == {"acc": 0.666667}


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"got \(2, 3\) and \(3,\)"):
        Accuracy().update(torch.zeros(2, 3), torch.zeros(3))


def test_there_is_no_result_before_the_first_batch_nor_after_a_reset() -> None:
    accuracy = Accuracy()
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"Accuracy.get_metric was called before any update"):
            accuracy.get_metric()
        accuracy.update(torch.tensor([1]), torch.tensor([1]))
        accuracy.reset()


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


def test_a_registered_number_can_be_set() -> None:
    accuracy = Accuracy()
    accuracy.total = 2
    accuracy.correct = accuracy.total * 0.5
    assert (accuracy.total.item(), accuracy.correct.tolist()) == (2, [1.0])


def test_a_metric_of_transformers_takes_its_names() -> None:
    accuracy = TransformersAccuracy()
    logits, labels = torch.tensor([[[0.1, 0.9], [0.9, 0.1], [0.9, 0.1]]]), torch.tensor([[1, 1, 0]])
    accuracy.update(logits, labels, torch.tensor([[1, 1, 0]]))
    assert accuracy.get_metric() == {"acc": 0.5}
    accuracy.reset()
    accuracy.update(logits[0], labels[0])
    assert accuracy.get_metric() == {"acc": 0.666667}


def test_arrays_are_accepted() -> None:
    accuracy = Accuracy()
    accuracy.update(np.array([1, 0]), np.array([1, 1]), seq_len=None)
    assert accuracy.get_metric() == {"acc": 0.5}
    assert accuracy.tensor2numpy(torch.ones(2)).tolist() == accuracy.tensor2numpy(np.ones(2)).tolist() == [1, 1]
    with pytest.raises(ValueError, match="got a list"):
        accuracy.tensor2numpy([1])


def test_a_wrong_metric_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Fraction already has an attribute 'total'"):
        Fraction().register_element("total")
    with pytest.raises(RuntimeError, match="Fraction already has an attribute 'positive'"):
        Fraction().register_element("positive")
    with pytest.raises(ValueError, match="aggregate_method must be"):
        Fraction().register_element("other", 0, aggregate_method="median")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = Fraction().nothing
    with pytest.raises(ValueError, match="backend"):
        Accuracy(backend="jittor")
    with pytest.raises(NotImplementedError, match="Metric needs a method update"):
        Metric().update()


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


def _evaluated() -> dict[str, Any]:
    """Return the results of an evaluation with metrics that gather, aggregate, or do neither."""
    generator = torch.Generator().manual_seed(0)
    rows = [{name: torch.randint(0, 3, (2, 5), generator=generator) for name in ("x", "target")} for _ in range(5)]
    tags = Vocabulary(padding=None, unknown=None).add_word_lst(["B-x", "I-x", "O"])
    metrics = {
        "span": SpanFPreRecMetric(tags),
        "class": ClassifyFPreRecMetric(f_type="macro"),
        "acc": Accuracy(),
        "own": Sums(),
        "itself": Sums(aggregate_when_get_metric=True),
    }
    return Evaluator(Same(), rows, metrics, verbose=0).run()


def _count_on(rank: int, at: str, single: dict[str, Any]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=2)
    accuracy, alone, several = Accuracy(), Accuracy(aggregate_when_get_metric=False), Several()
    for metric in (accuracy, alone, inherited := Inherited()):
        metric.update(torch.tensor([1, rank]), torch.tensor([1, 1]))  # 1 of 2 on rank 0, 2 of 2 on rank 1
    assert accuracy.get_metric() == accuracy.get_metric() == {"acc": 0.75}
    assert (accuracy.correct, accuracy.total) == (rank + 1, 2), "each rank keeps its own"
    assert inherited.get_metric() == {"percent": 75}
    assert alone.get_metric() == {"acc": (0.5, 1.0)[rank]}
    several.update(rank + 1.0)
    assert several.get_metric() == {"sum": [3, -3], "mean": [1.5, -1.5], "max": [2, -1], "min": [1, -2], "own": rank + 1}

    tags = Vocabulary(padding=None, unknown=None).add_word_lst(["B-x", "I-x", "O"])
    spans, classes = SpanFPreRecMetric(tags), ClassifyFPreRecMetric(only_gross=False)
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
    assert _evaluated() == single, "each rank reads its shard, and no batch counts twice"
    torch.distributed.destroy_process_group()


def test_numbers_are_aggregated_over_ranks_and_each_rank_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    single = _evaluated()
    assert single["sums#own"] == single["sums#itself"]
    assert len(single["sums#own"]) == 5
    spawn(_count_on, (str(tmp_path / "store"), single), nprocs=2)


def test_a_native_evaluation_accepts_a_metric() -> None:
    def judged(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": torch.ones(4, dtype=torch.long), "targets": torch.tensor([1, 1, 1, 0])}

    evaluate = Evaluate([torch.zeros(4, 1)], metrics={"acc": Accuracy()}, compute=judged)
    assert tiny_run(callbacks=[evaluate], epochs=1).history["eval/acc/acc"][0][1] == 0.75
