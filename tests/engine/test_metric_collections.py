"""Collections of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection

from cadenza import supervised
from cadenza.testing import tiny_trainer
from tests.engine.test_evaluation import unequal

MSE = supervised(nn.functional.mse_loss)


def test_metrics_of_one_compute_group_are_updated_once_a_batch_and_report_what_each_reports_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grouped() -> dict[str, Any]:
        return {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}

    together, trainer = MetricCollection(grouped()), tiny_trainer(compute_loss=MSE)
    updates: list[str] = []

    def watch(name: str, update: Callable[..., None]) -> Callable[..., None]:
        def watched(*given: Any) -> None:
            updates.append(name)
            update(*given)

        return watched

    for name, metric in together.items(copy_state=False):
        monkeypatch.setattr(metric, "update", watch(name, metric.update))
    for _ in range(2):
        updates.clear()
        results = trainer.evaluate(unequal(3, 4, 2), metrics=[together])
        assert results == trainer.evaluate(unequal(3, 4, 2), metrics=grouped())
    assert updates == ["mse"] * 3  # the groups are known since the first batch of the first evaluation
