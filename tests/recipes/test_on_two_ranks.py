"""The script of a recipe trains on two ranks too, and both end with the same weights and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.testing import launch
from tests.recipes.pages import executed, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


PAGES = [
    "gradient-checkpointing",
    "huggingface",
    "lora",
    "metric-collection",
    "text-generation",
    "timm-schedulers",
    "torchao",
    "transformers-schedulers",
]


@pytest.mark.parametrize("page", PAGES)
def test_both_ranks_end_with_the_same_weights_and_results(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def trained() -> tuple[int, dict[str, Any], dict[str, Any]]:
        torch.set_num_threads(1)
        names = executed(page, 1)
        run = names["run"]
        assert run.faults == []
        return (
            run.driver.world_size,
            weights(names["trainer"]),
            dict(run.evaluations["eval"].results if run.evaluations else {}),
        )

    (ranks, own, results), (_, other, its_results) = launch(trained)
    assert ranks == 2
    assert results == its_results
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
