"""``fit(resume="auto")`` of a run that is over: the model gets the weights with which the run ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, Swa
from cadenza.drivers.sharding import whole
from cadenza.status.plain import first_difference
from cadenza.testing import launch, tiny_loader, tiny_trainer

ENDS_WITH: dict[str, Callable[[], list[Callback]]] = {
    "those of the last step": lambda: [BestWeights("eval/loss", "max", restore=False), Ema(0.5, use_at_end=False)],
    "the best": lambda: [BestWeights("eval/loss", "max")],
    "the best before a stop": lambda: [EarlyStopping("eval/loss", "max", patience=2, restore_best=True)],
    "the average": lambda: [Ema(0.5, use_at_end=True)],
    "the average of the last part": lambda: [Swa(0.5, "1 step")],
}
CASES = [*((name, "single") for name in ENDS_WITH), *((name, "fsdp") for name in ("the best", "the average"))]


@pytest.mark.parametrize(("ends_with", "driver"), CASES)
def test_the_model_gets_the_weights_with_which_the_run_ended(ends_with: str, driver: str, tmp_path: Path) -> None:
    def fit() -> tuple[dict[str, Any], Any]:
        callbacks = [Evaluate(tiny_loader(2), "2 steps"), *ENDS_WITH[ends_with](), Checkpoint("3 steps")]
        one = tiny_trainer(
            callbacks=callbacks, directory=tmp_path, epochs=2, batches=8, seed=1, driver=driver, device="cpu",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        )  # fmt: skip
        outcome = one.fit(resume="auto").outcome
        return {name: whole(part).clone() for name, part in one.model.state_dict().items()}, outcome

    first, again = (launch(fit) if driver != "single" else [fit()] for _ in range(2))
    for (weights, outcome), (same, told) in zip(first, again, strict=True):
        assert first_difference(weights, same) is None
        assert outcome == told


def test_statistics_of_batch_norm_that_no_checkpoint_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit() -> dict[str, Any]:
        torch.manual_seed(1)
        one = tiny_trainer(
            model=nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), epochs=2, seed=1, directory=tmp_path,
            callbacks=[Swa(0.5, "1 step"), Checkpoint("1 epoch")],
        )  # fmt: skip
        one.fit(resume="auto")
        return {name: part.clone() for name, part in one.model.named_parameters()}

    with caplog.at_level(logging.WARNING, "cadenza"):
        first = fit()
        assert "BatchNorm statistics" not in caplog.text
        assert first_difference(first, fit()) is None
    assert "the BatchNorm statistics are those of the last weights" in caplog.text
