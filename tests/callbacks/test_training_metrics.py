"""Metrics of the training outputs in LogTraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.distributed.parts import driver

torchmetrics = pytest.importorskip("torchmetrics")

BATCHES, SIZE = 6, 4
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(BATCHES, SIZE, 1, generator=GENERATOR)
TARGETS = torch.randint(0, 2, (BATCHES, SIZE), generator=GENERATOR)


def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return outputs that do not depend on the weights."""
    scores = (batch[0] + model(batch[0]) * 0.0).squeeze(1).sigmoid()
    return {"loss": scores.mean() * 0.0, "predictions": scores, "targets": batch[1], "weight": float(batch[1].sum() > 0)}


class Mine:
    """A metric with a state of its own, which sees the inputs of all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        assert not predictions.requires_grad
        self.seen += predictions.tolist()

    def compute(self) -> float:
        return max(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = [*state["seen"]]


def metrics() -> dict[str, Any]:
    classes = torchmetrics.classification
    together = torchmetrics.MetricCollection({"precision": classes.BinaryPrecision(), "recall": classes.BinaryRecall()})
    return {"acc": classes.BinaryAccuracy(), "auc": classes.BinaryAUROC(), "both": [together], "mine": Mine()}


def expected(*batches: int) -> dict[str, float]:
    """Return what one update with these batches gives."""
    predictions, targets = INPUTS[[*batches]].flatten().sigmoid(), TARGETS[[*batches]].flatten()
    classes = torchmetrics.classification
    return {
        "train/acc": float(classes.BinaryAccuracy()(predictions, targets)),
        "train/auc": float(classes.BinaryAUROC()(predictions, targets)),
        "train/both/precision": float(classes.BinaryPrecision()(predictions, targets)),
        "train/both/recall": float(classes.BinaryRecall()(predictions, targets)),
        "train/mine": float(predictions.max()),
    }


def arguments(**more: Any) -> dict[str, Any]:
    return {"loader": [*zip(INPUTS, TARGETS, strict=True)], "compute_loss": compute, **more}


def log(every: str = "1 epoch") -> LogTraining:
    return LogTraining(every, outputs=(), metrics=metrics(), lr=False, throughput=False)


def test_metrics_are_those_of_the_interval_and_begin_anew() -> None:
    run = tiny_run(callbacks=[log("3 steps")], **arguments(epochs=2))
    for name in run.history.names:
        first, second = expected(0, 1, 2)[name], expected(3, 4, 5)[name]
        assert dict(run.history[name]) == pytest.approx({3: first, 6: second, 9: first, 12: second})
    assert {*run.history.names} == {*expected(0)}


def test_skipped_batches_do_not_count_and_an_interval_without_a_batch_has_no_value() -> None:
    @on(Callback.on_batch_start)
    def skip(run: Run, batch: Any) -> None:
        if run.progress.batch_in_epoch >= 2:
            run.skip_batch("a test")

    run = tiny_run(callbacks=[log("3 steps"), skip], **arguments())
    assert run.history.latest == pytest.approx(expected(0, 1))
    assert run.history["train/acc"][0][0] == 3


def test_a_metric_may_name_other_outputs() -> None:
    named = LogTraining("1 epoch", metrics={"acc": (torchmetrics.classification.BinaryAccuracy(), "predictions", "targets")})
    [(_, value)] = tiny_run(callbacks=[named], **arguments()).history["train/acc"]
    assert value == pytest.approx(expected(*range(6))["train/acc"])


def test_a_metric_without_a_state_is_an_error() -> None:
    class Stateless:
        def update(self, *_: Any) -> None: ...
        def compute(self) -> None: ...
        def reset(self) -> None: ...

    with pytest.raises(TypeError, match=r"metrics\['x'\] must have state_dict and load_state_dict"):
        LogTraining(metrics={"x": Stateless()})


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_that_resumes_inside_an_interval_has_the_same_results(at: int, tmp_path: Path) -> None:
    def fit(steps: int, folder: str) -> Any:
        made = tiny_trainer(callbacks=[log(), Checkpoint("1 step")], directory=tmp_path / folder, **arguments(steps=steps))
        history = made.fit(resume="auto").history
        return {name: history[name] for name in history.names}

    whole = fit(6, "whole")
    fit(at, "cut")
    assert fit(6, "cut") == whole
    assert {name: value for name, [(_, value)] in whole.items()} == pytest.approx(expected(*range(6)))


def on_ranks(work: Callable[[], Any]) -> Any:
    first, second = launch(work)
    assert first == second
    return first


def test_several_ranks_have_the_results_of_all_also_after_a_resume(tmp_path: Path) -> None:
    def fit(steps: int, folder: str) -> Any:
        made = tiny_trainer(
            callbacks=[log(), Checkpoint("1 step")], directory=tmp_path / folder, driver=driver(), **arguments(steps=steps)
        )
        history = made.fit(resume="auto").history
        return {name: history[name] for name in history.names}

    whole = on_ranks(lambda: fit(3, "whole"))
    on_ranks(lambda: fit(2, "cut"))
    assert on_ranks(lambda: fit(3, "cut")) == whole
    assert {name: value for name, [(_, value)] in whole.items()} == pytest.approx(expected(*range(6)))
