"""fastNLP's metrics: accuracy, and metrics of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from cadenza.callbacks import Evaluate
from cadenza.compat.fastnlp.core.metrics import Accuracy, Element, Metric
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


def test_an_element_behaves_like_its_number() -> None:
    one, two = Element("one", 1, None), Element("two", 2, None)
    assert (one + two, 1 + two, two - one, 3 - two, two * 3, 3 * two) == (3, 3, 1, 1, 6, 6)
    assert (one / two, 1 / two, float(two)) == (0.5, 0.5, 2.0)
    one += torch.tensor(4)
    one -= two
    assert (one.get_scalar(), repr(one)) == (3, "one: tensor(3)")


def test_a_wrong_element_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Fraction already has an attribute 'total'"):
        Fraction().register_element("total")
    with pytest.raises(ValueError, match="aggregate_method must be"):
        Fraction().register_element("other", 0, aggregate_method="median")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = Fraction().nothing
    with pytest.raises(ValueError, match="backend"):
        Accuracy(backend="jittor")  # type: ignore[arg-type]


class Several(Metric):
    """A number for each way to make the ranks' numbers one."""

    def __init__(self) -> None:
        super().__init__()
        for method in ("sum", "mean", "max", "min"):
            self.register_element(method, 0, aggregate_method=method)
        self.register_element("own", 0)

    def update(self, value: float) -> None:
        for element in self.elements.values():
            element.value = value

    def get_metric(self) -> dict[str, Any]:
        return {name: element.get_scalar() for name, element in self.elements.items()}


def _count_on(rank: int, at: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=2)
    accuracy, alone, several = Accuracy(), Accuracy(aggregate_when_get_metric=False), Several()
    for metric in (accuracy, alone):
        metric.update(torch.tensor([1, rank]), torch.tensor([1, 1]))  # 1 of 2 on rank 0, 2 of 2 on rank 1
    assert accuracy.get_metric() == accuracy.get_metric() == {"acc": 0.75}
    assert alone.get_metric() == {"acc": (0.5, 1.0)[rank]}
    several.update(rank + 1.0)
    assert several.get_metric() == {"sum": 3.0, "mean": 1.5, "max": 2.0, "min": 1.0, "own": rank + 1.0}
    torch.distributed.destroy_process_group()


def test_numbers_are_aggregated_over_ranks_and_each_rank_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    spawn(_count_on, (str(tmp_path / "store"),), nprocs=2)


def test_a_native_evaluation_accepts_a_metric() -> None:
    def judged(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": torch.ones(4, dtype=torch.long), "targets": torch.tensor([1, 1, 1, 0])}

    evaluate = Evaluate([torch.zeros(4, 1)], metrics={"acc": Accuracy()}, compute=judged)
    assert tiny_run(callbacks=[evaluate], epochs=1).history["eval/acc/acc"][0][1] == 0.75
