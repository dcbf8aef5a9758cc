"""All numbers that compute returns are averaged, and a metric chooses its inputs by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from cadenza import Callback, supervised
from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.errors import DataError, LossError, MonitorError
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer
from tests.engine.test_evaluation import unequal

MSE = supervised(nn.functional.mse_loss)


def returning(*outputs: dict[str, Any]) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """Return a compute that gives these outputs, batch by batch."""
    script = iter(outputs)
    return lambda model, batch: next(script)


def evaluated(*outputs: dict[str, Any], **arguments: Any) -> dict[str, float]:
    return tiny_trainer().evaluate(tiny_loader(len(outputs)), compute=returning(*outputs), **arguments)


# -- numbers ------------------------------------------------------------------------------------------


def test_every_number_is_a_mean_over_samples_also_with_a_shorter_last_batch() -> None:
    loader = unequal(4, 4, 1)

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        errors = (model(batch[0]) - batch[1]).flatten()
        return {"a": errors.abs().mean(), "loss": errors.square().mean(), "b": float(errors.mean()), "all": errors}

    trainer = tiny_trainer()
    with torch.no_grad():
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        errors = (trainer.model(inputs) - targets).flatten()
    results = trainer.evaluate(loader, compute=compute)
    assert list(results) == ["eval/loss", "eval/a", "eval/b"]
    assert results == {
        "eval/loss": pytest.approx(errors.square().mean().item()),
        "eval/a": pytest.approx(errors.abs().mean().item()),
        "eval/b": pytest.approx(errors.mean().item()),
    }


def test_the_weight_of_a_batch_holds_for_all_its_numbers() -> None:
    first = {"loss": torch.tensor(1.0), "kl": torch.tensor(10.0), "weight": torch.tensor(3)}
    second = {"loss": torch.tensor(5.0), "kl": 30, "weight": 1}
    assert evaluated(first, second) == {"eval/loss": 2.0, "eval/kl": 15.0}


def test_samples_that_a_batch_reports_are_its_weight() -> None:
    assert evaluated({"kl": 1.0, "samples": 1}, {"kl": 4.0, "samples": 2}) == {"eval/kl": 3.0}


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (2, 2.0),
        (True, 1.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(7), 7.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (numpy.float32(0.25), 0.25),
        (numpy.array(3), 3.0),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
    ],
)
def test_numbers_of_all_kinds_are_averaged(value: Any, mean: float) -> None:
    assert evaluated({"value": value}, {"value": value}) == {"eval/value": mean}


def test_what_is_no_number_and_what_has_a_meaning_of_its_own_is_not_averaged() -> None:
    reserved = {name: torch.tensor(1.0) for name in ("weight", "tokens", "predictions", "targets", "logits", "labels")}
    others = {
        "samples": 2,
        "all": torch.ones(2),
        "one": torch.ones(1),
        "text": "a",
        "nothing": None,
        "list": [1.0],
        "_own": 1.0,
    }
    assert evaluated(reserved | others | {"loss": torch.tensor(2.0)}) == {"eval/loss": 2.0}


def test_a_number_that_some_batches_lack_is_the_mean_over_the_others() -> None:
    assert evaluated({"a": 1.0, "weight": 1}, {"b": 4.0, "weight": 1}, {"a": 5.0, "weight": 3}) == {
        "eval/a": 4.0,
        "eval/b": 4.0,
    }


def test_a_tensor_that_changes_after_its_batch_counts_with_the_value_that_it_had() -> None:
    running = torch.zeros(())

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        running.add_(1)
        return {"running": running}

    assert tiny_trainer().evaluate(tiny_loader(3), compute=compute) == {"eval/running": 2.0}


def test_nan_shows_and_a_nan_of_weight_0_does_not() -> None:
    assert math.isnan(evaluated({"a": 1.0}, {"a": math.nan})["eval/a"])
    assert evaluated({"a": 1.0, "weight": 2}, {"a": math.nan, "weight": 0}) == {"eval/a": 1.0}


def test_sums_of_many_tokens_keep_their_digits() -> None:
    outputs = {"a": 1.0, "weight": 2**25}, {"a": 1.0, "weight": 1}, {"a": 2.0**26, "weight": 1}
    assert evaluated(*outputs)["eval/a"] == (2**25 + 1 + 2**26) / (2**25 + 2)


def test_more_numbers_than_are_kept_at_once_give_the_same_mean() -> None:
    values = [float(index % 7) for index in range(1300)]
    assert evaluated(*({"a": value} for value in values))["eval/a"] == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_a_total_weight_of_0_is_an_error_that_names_the_number() -> None:
    with pytest.raises(DataError, match="'eval' has no mean kl: its batches have a total weight of 0"):
        evaluated({"kl": 1.0, "weight": 0})


def test_a_complex_number_is_an_error_that_names_it() -> None:
    for value in (torch.tensor(1j), 1j):
        with pytest.raises(LossError, match=r"outputs\['z'\] of 'eval' is complex: expected a real number"):
            evaluated({"z": value})


def test_a_number_with_the_name_of_a_metric_is_an_error_at_the_first_batch() -> None:
    outputs = {"mse": torch.tensor(1.0), "predictions": torch.ones(2), "targets": torch.ones(2)}
    with pytest.raises(DataError, match=r"two results eval/mse: the mean of outputs\['mse'\], and the metric 'mse'\. Give one"):
        evaluated(outputs, outputs, metrics={"mse": MeanSquaredError()})
    with pytest.raises(
        DataError, match=r"two results of 'eval' have the name 'eval/both/mse'\. Give the metric 'both' another"
    ):
        evaluated(outputs | {"both/mse": 1.0, "mse": None}, metrics={"both": MetricCollection({"mse": MeanSquaredError()})})


def test_the_mean_of_a_number_can_be_watched() -> None:
    stop = EarlyStopping("eval/kl", mode="min", patience=1)
    evaluate = Evaluate(tiny_loader(1), compute=returning({"kl": 2.0}, {"kl": 3.0}, {"kl": 4.0}))
    run = tiny_run(callbacks=[evaluate, stop], epochs=9)
    assert [value for _, value in run.history["eval/kl"]] == [2.0, 3.0]


def test_a_function_may_report_any_number_so_its_names_are_checked_in_the_trial_before_the_first_epoch() -> None:
    def two_losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "loss_a": loss.detach() / 2}

    recorder, evaluate = Recorder(Callback.on_epoch_start), Evaluate(tiny_loader(1), sanity_batches=1)
    good, wrong = EarlyStopping("eval/loss_a", mode="min"), EarlyStopping("eval/loss_b", mode="min")
    assert tiny_run(compute_loss=two_losses, callbacks=[evaluate, good]).history["eval/loss_a"]
    with pytest.raises(
        MonitorError, match=r"watches 'eval/loss_b', but .* 'eval' reported only .*'eval/loss_a'\]\. Did you mean"
    ):
        tiny_run(compute_loss=two_losses, callbacks=[recorder, evaluate, wrong])
    assert recorder.names == []


# -- metrics by name ----------------------------------------------------------------------------------


def two_heads(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"logits_a": batch[0], "labels_a": batch[1], "logits_b": 2 * batch[0], "labels_b": batch[1], "kl": batch[0].mean()}


def test_a_metric_receives_the_outputs_that_it_names() -> None:
    loader = unequal(4, 3)
    inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    metrics = {
        "a": (MeanSquaredError(), "logits_a", "labels_a"),
        "b": (MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()}), "logits_b", "labels_b"),
        "mean": (MeanMetric(), "labels_a"),
    }
    results = tiny_trainer().evaluate(loader, compute=two_heads, metrics=metrics)
    assert results.pop("eval/kl") == pytest.approx(inputs.mean().item(), abs=1e-7)
    assert results == {
        "eval/a": pytest.approx((inputs - targets).square().mean().item()),
        "eval/b/mse": pytest.approx((2 * inputs - targets).square().mean().item()),
        "eval/b/mae": pytest.approx((2 * inputs - targets).abs().mean().item()),
        "eval/mean": pytest.approx(targets.mean().item()),
    }


def test_a_name_may_be_that_of_a_part_of_the_batch() -> None:
    loader = [{"x": torch.ones(2), "weights": torch.tensor([1.0, 3.0])}]
    results = tiny_trainer().evaluate(
        loader, compute=lambda model, batch: {"twice": 2 * batch["x"]}, metrics={"m": (MeanMetric(), "twice", "weights")}
    )
    assert results == {"eval/m": 2.0}


class F1Score(MeanMetric):
    """A metric that is named by its class."""


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (MeanSquaredError(), ["mean_squared_error"]),
        ([F1Score(), MeanAbsoluteError()], ["f1_score", "mean_absolute_error"]),
        ((MeanSquaredError(), MeanAbsoluteError()), ["mean_squared_error", "mean_absolute_error"]),
        ((MeanSquaredError(), "logits_a", "labels_a"), ["mean_squared_error"]),
        ([(MeanMetric(), "logits_a"), MetricCollection([MeanSquaredError()])], ["mean_metric", "MeanSquaredError"]),
        ({"a": {"mse": MeanSquaredError(), "more": [MeanAbsoluteError()]}}, ["a/mse", "a/more/mean_absolute_error"]),
        (MetricCollection(MetricCollection({"x": MeanSquaredError()}), prefix="y_"), ["y_x"]),
    ],
)
def test_metrics_come_in_any_form_and_those_without_a_name_are_named_by_their_class(metrics: Any, names: list[str]) -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {**two_heads(model, batch), "predictions": batch[0], "targets": batch[1], "kl": None}

    assert [*tiny_trainer().evaluate(tiny_loader(2), compute=compute, metrics=metrics)] == [f"eval/{name}" for name in names]


def test_an_input_that_is_missing_is_an_error_at_the_first_batch_that_says_what_there_is() -> None:
    metrics = {"acc_a": (MeanSquaredError(), "logits_a", "label_a")}
    expected = (
        r"metrics\['acc_a'\] of 'eval' needs 'label_a', but compute returned only \['logits_a', 'labels_a', .*\]\. "
        r"Did you mean 'labels_a'\?"
    )
    with pytest.raises(DataError, match=expected):
        tiny_trainer().evaluate(tiny_loader(2), compute=two_heads, metrics=metrics)
    with pytest.raises(
        DataError, match=r"needs 'y', but compute returned only \['loss'\], and the batch has \['x', 'target'\]"
    ):
        tiny_trainer().evaluate(
            [{"x": torch.ones(1), "target": torch.ones(1)}],
            compute=lambda model, batch: {"loss": torch.tensor(1.0)},
            metrics=[(MeanMetric(), "y")],
        )


def test_one_object_under_two_names_is_an_error_because_it_would_mix_them() -> None:
    metric = MeanSquaredError()
    with pytest.raises(ValueError, match="the metrics 'a' and 'b' are one object, which would be updated twice"):
        Evaluate(tiny_loader(1), metrics={"a": (metric, "x", "y"), "b": (metric, "z", "y")})


def test_a_metric_may_return_one_number_for_each_class_in_several_forms() -> None:
    class Several:
        def update(self, *given: Tensor) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> Any:
            return {"list": [1.0, torch.tensor(2.0)], "array": numpy.array([3.0]), "one": numpy.float32(4.0)}

    results = tiny_trainer(compute_loss=MSE).evaluate(tiny_loader(1), metrics=(Several(), "loss"))
    results.pop("eval/loss")
    assert results == {"eval/several/list/0": 1, "eval/several/list/1": 2, "eval/several/array/0": 3, "eval/several/one": 4}


class Scores:
    """A metric of several results, which are those of the evaluation itself."""

    flat = True

    def reset(self) -> None:
        self.batches: list[tuple[Any, Any]] = []

    def update(self, predictions: Any, targets: Any) -> None:
        self.batches.append((predictions, targets))

    def compute(self) -> dict[str, float]:
        return {"batches": len(self.batches), "pairs": sum(len(one) for one, _ in self.batches)}


def test_a_flat_metric_reports_results_of_the_evaluation_itself() -> None:
    pair = (torch.ones(2), torch.ones(2))
    outputs = {"predictions": pair, "targets": pair, "loss": 1.0}
    assert evaluated(outputs, metrics=[Scores()]) == {"eval/loss": 1.0, "eval/batches": 1.0, "eval/pairs": 2.0}
