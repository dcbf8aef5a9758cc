"""Evaluations on several ranks report what one process reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection

from cadenza.errors import DataError
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, samples, trainer
from tests.distributed.test_ddp import Share


def two_losses(model: nn.Module, batch: Batch) -> dict[str, Any]:
    predictions = model(batch[0])
    errors = (predictions - batch[1]).flatten()
    outputs = {"loss": errors.square().mean(), "kl": float(errors.mean()), "weight": batch[2].sum() + 1}
    if batch[2][0] == 8:  # on one rank alone
        outputs["rare"] = errors.abs().mean()
    return {**outputs, "a": predictions, "b": batch[1]}


class Stream(IterableDataset[Any]):
    """Some batches, and no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        data = samples(4 * self.count)
        for first in range(0, 4 * self.count, 4):
            yield data[first : first + 4]


def results(data: Any, limit: int | None = None) -> dict[str, float]:
    metrics = {
        "mse": (MeanSquaredError(), "a", "b"),
        "share": (Share(), "a", "b"),
        "both": (MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}), "b", "a"),
        "mean": (MeanMetric(), "kl"),
    }
    return trainer().evaluate(data, compute=two_losses, metrics=metrics, limit=limit)


@pytest.mark.parametrize("ranks", [2, 3])
def test_numbers_and_metrics_with_named_inputs_are_those_of_one_process(ranks: int) -> None:
    def all_kinds() -> list[dict[str, float]]:
        uneven = loader(37, shuffle=False)
        return [results(uneven), results(uneven, limit=4), results(DataLoader(Stream(7), batch_size=None))]

    alone = all_kinds()
    assert set(alone[0]) == {f"eval/{name}" for name in ("loss", "kl", "rare", "mse", "share", "both/mse", "both/rmse", "mean")}
    for got in launch(all_kinds, ranks):
        for one, expected in zip(got, alone, strict=True):
            assert one == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_any_batch_takes_part_with_nothing() -> None:
    def short() -> dict[str, float]:
        stream = DataLoader(Stream(2), batch_size=None)
        metrics = {"share": (Share(), "a", "b"), "mse": (MeanSquaredError(), "a", "b")}
        return trainer().evaluate(stream, compute=two_losses, metrics=metrics)

    alone = short()
    assert launch(short, 3) == [pytest.approx(alone, rel=1e-6)] * 3


def test_a_metric_that_keeps_lists_needs_a_batch_on_each_rank_and_says_so() -> None:
    def short() -> str:
        with pytest.raises(DataError) as caught:
            trainer().evaluate(DataLoader(Stream(1), batch_size=None), compute=two_losses, metrics={"cat": (CatMetric(), "kl")})
        return str(caught.value)

    for message in launch(short, 2):
        assert message.startswith("the metric 'cat' of 'eval' keeps a list on each rank")


def test_no_batch_on_any_rank_is_an_error_on_all() -> None:
    def empty() -> str:
        with pytest.raises(DataError) as caught:
            trainer().evaluate(DataLoader(Stream(0), batch_size=None), compute=two_losses)
        return str(caught.value)

    assert (
        launch(empty, 2) == ["the loader of 'eval' gave no batch. Give one that has at least one, and can be read again."] * 2
    )
