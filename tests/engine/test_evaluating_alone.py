"""A trainer evaluates and predicts before its first fit, with every callback in its list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, on
from cadenza.callbacks import Best, Checkpoint, Evaluate
from cadenza.testing import tiny_loader, tiny_trainer
from tests.callbacks.shipped import CALLBACKS as SHIPPED

KEEPING_THE_BEST: dict[str, Callable[[], Callback]] = {
    "keep_best": lambda: Checkpoint("1 epoch", keep_best=("eval/loss", "min")),
    "keep=Best": lambda: Checkpoint("1 epoch", keep=Best("eval/loss", 2, mode="min")),
}
CALLBACKS = KEEPING_THE_BEST | {name: row.cases[0] for name, row in SHIPPED.items() if row.cases}


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_evaluation_before_a_fit_needs_nothing_that_a_fit_prepares(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where SavePredictions writes outside of a run
    trainer = tiny_trainer(directory=tmp_path / "run", callbacks=[Evaluate(tiny_loader()), CALLBACKS[name]()])
    results = trainer.evaluate(tiny_loader())
    assert results.keys() == {"eval/loss"}
    trainer.predict(tiny_loader(), compute=lambda model, batch: model(batch[0]))
    assert not (tmp_path / "run").exists()


def test_a_fit_afterwards_keeps_the_best_of_its_own_evaluations_only(tmp_path: Path) -> None:
    trainer = tiny_trainer(directory=tmp_path, callbacks=[Evaluate(tiny_loader()), KEEPING_THE_BEST["keep_best"]()])
    trainer.evaluate(tiny_loader())
    run = trainer.fit()
    assert trainer.evaluate(tiny_loader(), which="best")["eval/loss"] == run.history.latest["eval/loss"]


def test_the_total_of_steps_counts_windows_and_not_batches() -> None:
    seen = []
    look = on(Callback.on_fit_start)(lambda run: seen.append([run.progress.total(unit) for unit in ("step", "batch", "epoch")]))
    run = tiny_trainer(callbacks=[look], batches=8, accumulate=3, epochs=2).fit()
    assert seen == [[6, 16, 2]]
    assert run.progress.step == 6


def test_a_limit_of_batches_is_no_bool() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1 batch, or None for all; got True"):
        Evaluate(tiny_loader(), limit=True)


def test_an_evaluation_outside_of_a_run_has_the_metrics_of_the_one_with_its_name(tmp_path: Path) -> None:
    class Count:
        seen = 0

        def update(self, predictions: Tensor, targets: Tensor) -> None:
            self.seen += len(targets)

        def compute(self) -> float:
            return float(self.seen)

        def reset(self) -> None:
            self.seen = 0

    def judged(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": torch.tensor(2.0), "predictions": model(batch[0]), "targets": batch[1]}

    evaluate = Evaluate(tiny_loader(2), "1 step", metrics={"count": Count()}, name="test", compute=judged)
    trainer = tiny_trainer(callbacks=[evaluate, Checkpoint("1 step")], steps=2, directory=tmp_path, seed=1)
    trainer.fit()
    assert trainer.evaluate(tiny_loader(3), name="test", which="last")["test/count"] == 6
    assert trainer.evaluate(tiny_loader(3), name="test")["test/count"] == 6
    assert [*trainer.evaluate(tiny_loader(3))] == ["eval/loss"]
    assert [*trainer.evaluate(tiny_loader(3), name="test", metrics={})] == ["test/loss"]
    alone = trainer.evaluate(tiny_loader(3), name="test", compute=lambda model, batch: {"loss": torch.tensor(1.0)})
    assert alone == {"test/loss": 1.0}
