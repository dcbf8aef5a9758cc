"""All numbers that compute returns are averaged over the samples, and a metric chooses its inputs by name."""

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
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import unequal

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


NAN, TWO = torch.tensor(math.nan), torch.tensor(2.0)
MEANS: dict[str, tuple[list[dict[str, Any]], dict[str, float]]] = {
    "the weight of a batch holds for all its numbers": (
        [
            {"loss": torch.tensor(1.0), "kl": torch.tensor(10.0), "weight": torch.tensor(3)},
            {"loss": torch.tensor(5.0), "kl": 30, "weight": 1},
        ],
        {"eval/loss": 2.0, "eval/kl": 15.0},
    ),
    "samples that a batch reports are its weight": ([{"kl": 1.0, "samples": 1}, {"kl": 4.0, "samples": 2}], {"eval/kl": 3.0}),
    "a number that some batches lack is the mean over the others": (
        [{"a": 1.0, "weight": 1}, {"b": 4.0, "weight": 1}, {"a": 5.0, "weight": 3}],
        {"eval/a": 4.0, "eval/b": 4.0},
    ),
    "a NaN of weight 0 counts for nothing": ([{"a": 1.0, "weight": 2}, {"a": math.nan, "weight": 0}], {"eval/a": 1.0}),
    "nor does a loss that is NaN and has weight 0": (
        [{"loss": torch.tensor(1.0), "weight": 3.0}, {"loss": NAN, "weight": 0}, {"loss": torch.tensor(5.0), "weight": 1.0}],
        {"eval/loss": 2.0},
    ),
    "nor with a float": ([{"loss": TWO, "weight": 1}, {"loss": NAN, "weight": 0.0}], {"eval/loss": 2.0}),
    "nor with a tensor": ([{"loss": TWO, "weight": 1}, {"loss": NAN, "weight": torch.tensor(0)}], {"eval/loss": 2.0}),
    "sums of many tokens keep their digits": (
        [{"a": 1.0, "weight": 2**25}, {"a": 1.0, "weight": 1}, {"a": 2.0**26, "weight": 1}],
        {"eval/a": (2**25 + 1 + 2**26) / (2**25 + 2)},
    ),
    "what is no number and what has a meaning of its own is not averaged": (
        [
            {name: torch.tensor(1.0) for name in ("weight", "tokens", "predictions", "targets", "logits", "labels")}
            | {"samples": 2, "all": torch.ones(2), "one": torch.ones(1), "text": "a", "nothing": None, "list": [1.0]}
            | {"_own": 1.0, "loss": TWO}
        ],
        {"eval/loss": 2.0},
    ),
}


@pytest.mark.parametrize("case", MEANS)
def test_the_mean_of_the_numbers_of_the_batches(case: str) -> None:
    outputs, means = MEANS[case]
    assert evaluated(*outputs) == means


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


def test_a_tensor_that_changes_after_its_batch_counts_with_the_value_that_it_had() -> None:
    running = torch.zeros(())

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        running.add_(1)
        return {"running": running}

    assert tiny_trainer().evaluate(tiny_loader(3), compute=compute) == {"eval/running": 2.0}
    assert math.isnan(evaluated({"a": 1.0}, {"a": math.nan})["eval/a"]), "NaN shows"


def test_more_numbers_than_are_kept_at_once_and_an_empty_batch_give_the_same_mean() -> None:
    values = [float(index % 7) for index in range(1300)]
    assert evaluated(*({"a": value} for value in values))["eval/a"] == pytest.approx(sum(values) / len(values), rel=1e-12)
    full = tiny_loader(2)
    with_empty = [full[0], (torch.empty(0, 1), torch.empty(0, 1)), full[1]]
    one = tiny_trainer(compute_loss=MSE)
    assert one.evaluate(with_empty) == one.evaluate(full)


def test_the_loss_of_a_float64_model_keeps_its_digits() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].double()).sum() * 0 + 1 + 1e-12  # type: ignore[no-any-return]

    (loss,) = tiny_trainer(model=tiny_model().double(), compute_loss=compute).evaluate(tiny_loader()).values()
    assert loss - 1 == pytest.approx(1e-12, rel=1e-3)


MEASURED = {"mse": torch.tensor(1.0), "predictions": torch.ones(2), "targets": torch.ones(2)}
BOTH = MetricCollection({"mse": MeanSquaredError()})
COMPLEX = r"outputs\['z'\] of 'eval' is complex: expected a real number"


@pytest.mark.parametrize(
    ("outputs", "metrics", "error", "message"),
    [
        ([{"kl": 1.0, "weight": 0}], None, DataError, "'eval' has no mean kl: its batches have a total weight of 0"),
        ([{"loss": NAN, "weight": 0}] * 2, None, DataError, "'eval' has no mean loss: its batches have a total weight of 0"),
        ([{"z": torch.tensor(1j)}], None, LossError, COMPLEX),
        ([{"z": 1j}], None, LossError, COMPLEX),
        (
            [MEASURED] * 2,
            {"mse": MeanSquaredError()},
            DataError,
            r"two results eval/mse: the mean of outputs\['mse'\], and the metric 'mse'\. Give one",
        ),
        (
            [MEASURED | {"both/mse": 1.0, "mse": None}],
            {"both": BOTH},
            DataError,
            r"two results of 'eval' have the name 'eval/both/mse'\. Give the metric 'both' another",
        ),
    ],
)
def test_numbers_without_a_mean_or_a_name_of_their_own_are_an_error(
    outputs: list[dict[str, Any]], metrics: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluated(*outputs, metrics=metrics)


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


def test_a_metric_receives_the_outputs_that_it_names_or_a_part_of_the_batch() -> None:
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
    batch = {"x": torch.ones(2), "weights": torch.tensor([1.0, 3.0])}
    doubled = {"m": (MeanMetric(), "twice", "weights")}
    of_batch = tiny_trainer().evaluate([batch], compute=lambda model, batch: {"twice": 2 * batch["x"]}, metrics=doubled)
    assert of_batch == {"eval/m": 2.0}


class F1Score(MeanMetric):
    """A metric that is named by its class."""


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ([], []),
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


MISSING = (
    r"metrics\['acc_a'\] of 'eval' needs 'label_a', but compute returned only \['logits_a', 'labels_a', .*\]\. "
    r"Did you mean 'labels_a'\?"
)


def test_an_input_that_is_missing_or_one_object_under_two_names_is_an_error() -> None:
    with pytest.raises(DataError, match=MISSING):
        tiny_trainer().evaluate(
            tiny_loader(2), compute=two_heads, metrics={"acc_a": (MeanSquaredError(), "logits_a", "label_a")}
        )
    batch = {"x": torch.ones(1), "target": torch.ones(1)}
    with pytest.raises(
        DataError, match=r"needs 'y', but compute returned only \['loss'\], and the batch has \['x', 'target'\]"
    ):
        tiny_trainer().evaluate([batch], compute=returning({"loss": torch.tensor(1.0)}), metrics=[(MeanMetric(), "y")])
    metric = MeanSquaredError()
    with pytest.raises(ValueError, match="the metrics 'a' and 'b' are one object, which would be updated twice"):
        Evaluate(tiny_loader(1), metrics={"a": (metric, "x", "y"), "b": (metric, "z", "y")})


class Several:
    """A metric of several results in several forms."""

    def update(self, *given: Tensor) -> None: ...
    def reset(self) -> None: ...
    def compute(self) -> Any:
        numbers = {"list": [1.0, torch.tensor(2.0)], "array": numpy.array([3.0]), "one": numpy.float32(4.0)}
        return numbers | {"tensor": torch.tensor([0.25, 0.5])}


class Scores:
    """A metric of several results, which are those of the evaluation itself."""

    flat = True

    def reset(self) -> None:
        self.batches: list[tuple[Any, Any]] = []

    def update(self, predictions: Any, targets: Any) -> None:
        self.batches.append((predictions, targets))

    def compute(self) -> dict[str, float]:
        return {"batches": len(self.batches), "pairs": sum(len(one) for one, _ in self.batches)}


def test_a_metric_may_return_one_number_for_each_class_and_a_flat_one_reports_them_as_results_of_the_evaluation() -> None:
    pair = (torch.ones(2), torch.ones(2))
    results = evaluated({"predictions": pair, "targets": pair, "loss": 1.0}, metrics=[Scores(), (Several(), "loss")])
    flat = {"eval/loss": 1, "eval/batches": 1, "eval/pairs": 2}
    several = {"list/0": 1, "list/1": 2, "array/0": 3, "one": 4, "tensor/0": 0.25, "tensor/1": 0.5}
    assert results == flat | {f"eval/several/{name}": value for name, value in several.items()}


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
