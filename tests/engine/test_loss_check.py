"""A loss that is not finite is told once, without StopOnNonFinite too, and the outcome mentions it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, FindLearningRate, LogTraining, StopOnNonFinite
from cadenza.status.decisions import Decision
from cadenza.testing import tiny_loader, tiny_run

NAN = math.nan
LOG = LogTraining("1 step", throughput=False, lr=False)


def told(run: Run) -> list[Decision]:
    return [decision for decision in run.decisions if decision.what == "loss not finite"]


@pytest.mark.parametrize("last", [NAN, 1.0])
def test_the_first_that_is_logged_is_told_and_the_outcome_says_since_when(
    last: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = tiny_run(losses=[1.0, 2.0, math.inf, NAN, last], callbacks=[LOG], directory=tmp_path)
    assert [str(decision.why) for decision in told(run)] == ["train/loss is inf at step 3"]
    assert caplog.text.count("train/loss is inf at step 3, and training goes on") == 1
    assert "StopOnNonFinite()" in caplog.text
    ending = "from step 3 on" if math.isnan(last) else "at step 3"
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("finished", f"the limit is reached; train/loss was not finite {ending}")
    assert json.loads((tmp_path / "run.json").read_text())["outcome"]["reason"] == run.outcome.reason


def test_without_a_record_the_last_loss_of_each_epoch_is_looked_at() -> None:
    seen: list[int] = []

    @on(Callback.on_epoch_end)
    def count(run: Run) -> None:
        seen.append(len(told(run)))

    def broken(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).mean() * 1e38 * 1e38
        return loss

    run = tiny_run(compute_loss=broken, epochs=3, callbacks=[count])
    assert seen == [0, 1, 1]
    assert [(one.when.epoch, one.when.step) for one in told(run)] == [(1, 5)]
    assert run.outcome is not None
    assert run.outcome.reason.endswith("; the loss was not finite from step 5 on")
    inside = tiny_run(compute_loss=broken, steps=3)  # no epoch is over
    assert [one.when.step for one in told(inside)] == [3]


def test_the_loss_of_an_evaluation_counts_and_its_metrics_do_not() -> None:
    def odd(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.tensor(NAN)}

    run = tiny_run(callbacks=[Evaluate(tiny_loader(1), compute=odd)], epochs=2)
    assert [one.why for one in told(run)] == ["eval/loss is nan at step 5"]

    @on(Callback.on_step_end)
    def score(run: Run) -> None:
        run.log("train/score", NAN)

    assert not told(tiny_run(callbacks=[score]))


def test_what_stop_on_non_finite_says_is_not_said_twice() -> None:
    for action in ("stop", "skip"):
        run = tiny_run(losses=[1.0, NAN], callbacks=[StopOnNonFinite(cast("Any", action)), LOG])
        assert not told(run)
        assert run.outcome is not None
        assert run.outcome.reason == ("the loss is nan" if action == "stop" else "the limit is reached")


def test_a_stop_of_another_reason_mentions_it_too() -> None:
    stop = on(Callback.on_step_end, at=3)(lambda run: run.stop("enough"))
    run = tiny_run(losses=[1.0, NAN, NAN, NAN], callbacks=[LOG, stop])
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough; train/loss was not finite from step 2 on")


def test_a_trial_of_rates_that_diverges_says_nothing() -> None:
    find = FindLearningRate(start=1.0, end=1e30, steps=30)
    assert not told(tiny_run(callbacks=[find, LOG]))


def test_in_fp16_one_loss_that_overflows_is_no_fault() -> None:
    """The scaler leaves out its update."""
    losses = [1.0, math.inf, 1.0, 1.0]
    run = tiny_run(losses=losses, precision="fp16", callbacks=[LOG])
    assert not told(run)
    lasting = tiny_run(losses=[1.0, math.inf, NAN, NAN], precision="fp16", callbacks=[LOG])
    assert lasting.outcome is not None
    assert lasting.outcome.reason.endswith("; train/loss was not finite from step 2 on")
