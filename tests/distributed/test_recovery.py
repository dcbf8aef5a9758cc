"""Two ranks are rolled back, killed at once and started again; the best by averaged weights is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, load_weights, on
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer


@pytest.mark.parametrize("driver", ["ddp", "fsdp"])
def test_two_ranks_continue_the_branch_that_a_rollback_began(tmp_path: Path, driver: str) -> None:
    def fit(resume: Any, steps: int, *callbacks: Callback) -> int:
        judge = Evaluate(tiny_loader(2), every="2 steps", weights="ema")
        keep = Checkpoint("2 steps", keep_last=None, keep_best=("eval/loss", "min"), on_exception=False)
        given = [Ema(0.9), judge, keep, *callbacks]
        run = tiny_trainer(callbacks=given, directory=tmp_path, steps=steps, seed=1, driver=driver, batches=8).fit(
            resume=resume
        )
        return run.progress.origin.step

    @on(Callback.on_batch_start)
    def kill(run: Run, batch: Any) -> None:
        if run.progress.step == 5:
            raise KeyboardInterrupt

    def job() -> list[int]:
        fit("auto", 10)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "checkpoints" / "step-00000004", 10, kill)
        return [fit("auto", 8), fit("auto", 8)]

    assert on_ranks(job, 2) == [[4, 8], [4, 8]]
    averaged, own = tiny_model(), tiny_model()
    load_weights(tmp_path, averaged)
    load_weights(tmp_path, own, weights="model")
    assert averaged.weight.item() == pytest.approx(0.7376850843)
    assert own.weight.item() == pytest.approx(1.1870883703)
