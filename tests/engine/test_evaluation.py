"""Evaluation: right numbers, metrics by name, and nothing of the training is disturbed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from cadenza import Callback, Evaluation, on, supervised
from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.engine import evaluation as evaluating
from cadenza.engine.session import Session, session_of
from cadenza.errors import DataError, LossError, MonitorError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import broken, unequal

MSE = supervised(nn.functional.mse_loss)


# -- numbers ------------------------------------------------------------------------------------------


def test_results_equal_those_of_an_evaluation_written_by_hand_each_time_anew() -> None:
    loader, model, metrics = unequal(4, 4, 1), tiny_model(), {"mse": MeanSquaredError()}
    results = tiny_trainer(model=model, compute_loss=MSE).evaluate(loader, metrics=metrics)
    with torch.no_grad():
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        by_hand = nn.functional.mse_loss(model(inputs), targets).item()
    assert results == {"eval/loss": pytest.approx(by_hand), "eval/mse": pytest.approx(by_hand)}
    run = tiny_run(compute_loss=MSE, epochs=2, callbacks=[Evaluate(tiny_loader(2), metrics=metrics)])
    losses = [value for _, value in run.history["eval/loss"]]
    assert [value for _, value in run.history["eval/mse"]] == pytest.approx(losses)


def test_logits_and_labels_serve_as_predictions_and_targets() -> None:
    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = tiny_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.linear(x).mean(), "logits": labels + 1}

    loader = [{"x": torch.ones(2, 1), "labels": torch.zeros(2, 1)}]
    trainer = tiny_trainer(model=Wordy(), compute_loss=None, loader=loader)
    assert trainer.evaluate(loader, metrics={"mse": MeanSquaredError()})["eval/mse"] == 1.0


@dataclass(slots=True)
class Slotted:
    loss: Tensor
    predictions: Tensor


@pytest.mark.parametrize("form", [Slotted, lambda **parts: SimpleNamespace(**parts), dict])
def test_whatever_trains_can_be_evaluated(form: Any) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        predictions = model(batch[0])
        return form(loss=nn.functional.mse_loss(predictions, batch[1]), predictions=predictions)

    trainer = tiny_trainer(compute_loss=compute_loss)
    trainer.fit()
    assert trainer.evaluate(tiny_loader(1)).keys() == {"eval/loss"}


# -- nothing is disturbed -----------------------------------------------------------------------------


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class RandomLoader:
    """A loader that draws random numbers of all kinds."""

    def __iter__(self) -> Any:
        for inputs, targets in tiny_loader(2):
            random.random()  # no secret
            numpy.random.rand()  # the global generator is what is looked at
            yield inputs + torch.rand_like(inputs), targets


def streams() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]  # numpy types it as any of two forms


@pytest.mark.parametrize("fails", [False, True], ids=["complete", "after an error"])
def test_the_mode_of_every_module_and_the_random_streams_are_put_back(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    trainer = tiny_trainer(model=model, compute_loss=MSE)
    model.train()
    model[1].eval()  # as people do who freeze a part
    before, state, inside = modes(trainer.model), streams(), list[list[bool]]()

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inside.append(modes(model))
        if fails:
            raise RuntimeError("broken")
        return {"loss": torch.zeros(())}

    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        trainer.evaluate(RandomLoader(), compute=compute)
    assert modes(trainer.model) == before
    assert streams() == state
    assert not any(inside[0])


def test_no_gradient_is_kept_and_none_is_dropped() -> None:
    required: list[bool] = []
    gradients: list[bool] = []

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        required.append(model(batch[0]).requires_grad)
        return {"loss": torch.zeros(())}

    look = on(Callback.on_eval_end)(lambda run, _: gradients.append(all(p.grad is not None for p in run.model.parameters())))
    evaluate = Evaluate(tiny_loader(1), compute=compute, every="1000 steps")
    midway = on(Callback.on_before_optimizer_step)(evaluate.evaluate)
    tiny_run(callbacks=[evaluate, midway, look], steps=1, epochs=1000)
    assert required == [False]
    assert gradients == [True]


def dropout_run(*callbacks: Callback) -> Tensor:
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (index + 1) / 8)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).unsqueeze(1), torch.linspace(1, 3, 24).unsqueeze(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    run = tiny_run(model=model, loader=loader, compute_loss=MSE, epochs=3, seed=7, callbacks=callbacks)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_a_run_with_a_seed_can_be_repeated_bit_by_bit_however_often_it_evaluates() -> None:
    first = dropout_run()
    torch.rand(5)
    for every in ("1 step", "2 steps", "1 epoch", "0.5 epoch"):
        assert torch.equal(dropout_run(Evaluate(RandomLoader(), every=every, sanity_batches=1)), first), every
    assert torch.equal(first, dropout_run())


# -- Evaluate -----------------------------------------------------------------------------------------


def test_several_evaluations_each_have_their_loader_cadence_and_name_and_count_from_the_start() -> None:
    """A progress bar that opens in ``on_eval_start`` would show the batches of the last pass, and their speed."""
    counts: list[int] = []
    look = on(Callback.on_eval_start)(lambda run, evaluation: counts.append(evaluation.batch))
    callbacks = [Evaluate(tiny_loader(1), every="2 steps"), Evaluate(tiny_loader(2), every="1 epoch", name="test"), look]
    run = tiny_run(callbacks=callbacks, epochs=2, batches=4)
    assert [step for step, _ in run.history["eval/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in run.history["test/loss"]] == [4, 8]
    assert counts == [0] * 6
    assert run.evaluations["test"].batch == 2


def test_a_limit_takes_no_batch_more() -> None:
    taken: list[int] = []

    def reading() -> Iterator[Any]:
        for number, batch in enumerate(tiny_loader(5)):
            taken.append(number)
            yield batch

    tiny_trainer().evaluate(reading(), limit=2)
    assert taken == [0, 1]


def test_a_trial_comes_before_the_first_epoch_and_its_results_count_nowhere() -> None:
    recorder = Recorder()
    results: list[Mapping[str, float]] = []
    look = on(Callback.on_sanity_end)(lambda run, evaluation: results.append(evaluation.results))
    evaluate = Evaluate(tiny_loader(5), sanity_batches=2, every="1000 steps")
    run = tiny_run(callbacks=[recorder, evaluate, look], steps=1, epochs=1000)
    assert recorder.names[:5] == ["on_setup", "on_fit_start", "on_sanity_start", "on_sanity_end", "on_epoch_start"]
    assert not {name for name in recorder.names if "eval" in name}
    assert list(results[0]) == ["eval/loss"]
    assert run.history.names == []
    assert evaluate.evaluation.results == {}


def test_when_better_evaluates_only_after_a_gain_elsewhere_and_is_kept_over_a_save_and_a_load() -> None:
    losses = iter([3.0, 2.0, 2.5, 1.0])
    watched = Evaluate(tiny_loader(1), compute=lambda model, batch: {"loss": torch.tensor(next(losses))})
    after = Evaluate(tiny_loader(1), name="test", when_better=("eval/loss", "min"))
    run = tiny_run(callbacks=[watched, after], epochs=4, batches=1)
    assert [step for step, _ in run.history["test/loss"]] == [1, 2, 4]
    after.load_state_dict({"better": True, "best": 1.5})
    assert after.state_dict() == {"better": True, "best": 1.5}


@pytest.mark.parametrize("do", [evaluating.evaluate, evaluating.predict])
def test_an_evaluation_knows_at_its_end_whether_it_is_complete(do: Callable[[Session, Evaluation], Any]) -> None:
    seen: list[tuple[bool, bool]] = []
    look = on(Callback.on_eval_end)(lambda run, one: seen.append((one.complete, bool(one.results))))
    evaluation = Evaluation(tiny_loader(1), compute=lambda model, batch: {"predictions": batch[0], "loss": 1.0})
    run = tiny_run(callbacks=[look])
    do(session_of(run), evaluation)
    evaluation.loader = broken()
    with pytest.raises(OSError, match="the disk is gone"):
        do(session_of(run), evaluation)
    assert seen == [(True, do is evaluating.evaluate), (False, False)]


def test_what_an_evaluation_computes_may_be_kept_and_trained_with_and_inference_mode_is_there_for_who_asks_for_it() -> None:
    kept: list[Tensor] = []

    def compute(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        kept.append(model(batch[0]))
        return {"loss": nn.functional.mse_loss(kept[-1], batch[1])}

    trainer = tiny_trainer(callbacks=[Evaluate(tiny_loader(2), compute=compute, sanity_batches=1)])
    trainer.fit()
    assert [one.is_inference() for one in kept] == [False] * 3, "in the sanity evaluation, too"
    distilled = tiny_run(compute_loss=MSE, loader=list(zip((x for x, _ in tiny_loader(2)), kept[1:], strict=True)))
    assert distilled.progress.step == 2
    plain = trainer.evaluate(tiny_loader(2), compute=compute)
    assert plain == trainer.evaluate(tiny_loader(2), compute=torch.inference_mode()(compute))
    assert [one.is_inference() for one in kept[3:]] == [False] * 2 + [True] * 2


# -- all numbers that compute returns are averaged over the samples ----------------------------------


def returning(*outputs: dict[str, Any]) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """Return a compute that gives these outputs, batch by batch."""
    script = iter(outputs)
    return lambda model, batch: next(script)


def evaluated(*outputs: dict[str, Any], **arguments: Any) -> dict[str, float]:
    return tiny_trainer().evaluate(tiny_loader(len(outputs)), compute=returning(*outputs), **arguments)


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


# -- errors -------------------------------------------------------------------------------------------

BATCH, METRIC = tiny_loader(1), MeanSquaredError()
MEASURED = {"mse": torch.tensor(1.0), "predictions": torch.ones(2), "targets": torch.ones(2)}
TWO_HEADED: dict[str, Any] = {"compute": two_heads, "metrics": {"acc_a": (METRIC, "logits_a", "label_a")}}
ONE_LOSS: dict[str, Any] = {"compute": lambda model, batch: {"loss": TWO}, "metrics": [(MeanMetric(), "y")]}
NOTHING = {"loss": NAN, "weight": 0}
PAIR = r'when_better must be a pair such as \("eval/acc", "max"\); got'
COMPLEX = r"outputs\['z'\] of 'eval' is complex: expected a real number"
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Evaluate(BATCH, when_better=cast("Any", "eval/acc")), TypeError, PAIR),
    (lambda: Evaluate(BATCH, when_better=cast("Any", ("eval/acc",))), TypeError, PAIR),
    (lambda: Evaluate(BATCH, when_better=cast("Any", 3)), TypeError, PAIR),
    (lambda: Evaluate(BATCH, limit=0), ValueError, "limit must be at least 1 batch, or None for all; got 0"),
    (lambda: Evaluate(BATCH, sanity_batches=-1), ValueError, "sanity_batches must be a whole number of at least 0; got -1"),
    (
        lambda: tiny_run(callbacks=[Evaluate(BATCH), Evaluate(BATCH)]),
        ValueError,
        r"two evaluations have the name 'eval'.*Give another Evaluate\(name=\.\.\.\)",
    ),
    (
        lambda: tiny_trainer().evaluate(BATCH, metrics={"m": MeanMetric()}),
        DataError,
        r"the metrics of 'eval' need 'predictions' and 'targets' from compute; it returned \['loss'\]",
    ),
    (lambda: tiny_trainer().evaluate([]), DataError, r"the loader of 'eval' gave no batch\. Give one that has at least one"),
    (
        lambda: tiny_trainer(compute_loss=lambda model, batch: model(batch[0])).evaluate(BATCH),
        LossError,
        r"the loss of 'eval' must have shape \(\); got \(2, 1\)",
    ),
    (lambda: evaluated({"kl": 1.0, "weight": 0}), DataError, "'eval' has no mean kl: its batches have a total weight of 0"),
    (lambda: evaluated(NOTHING, NOTHING), DataError, "'eval' has no mean loss: its batches have a total weight of 0"),
    (lambda: evaluated({"z": torch.tensor(1j)}), LossError, COMPLEX),
    (lambda: evaluated({"z": 1j}), LossError, COMPLEX),
    (
        lambda: evaluated(MEASURED, MEASURED, metrics={"mse": MeanSquaredError()}),
        DataError,
        r"two results eval/mse: the mean of outputs\['mse'\], and the metric 'mse'\. Give one",
    ),
    (
        lambda: evaluated(MEASURED | {"a/mse": 1.0, "mse": None}, metrics={"a": MetricCollection({"mse": METRIC})}),
        DataError,
        r"two results of 'eval' have the name 'eval/a/mse'\. Give the metric 'a' another",
    ),
    (
        lambda: tiny_trainer().evaluate(tiny_loader(2), **TWO_HEADED),
        DataError,
        r"metrics\['acc_a'\] of 'eval' needs 'label_a', but compute returned only \['logits_a', 'labels_a', .*\]\. Did you"
        r" mean 'labels_a'\?",
    ),
    (
        lambda: tiny_trainer().evaluate([{"x": torch.ones(1), "target": torch.ones(1)}], **ONE_LOSS),
        DataError,
        r"needs 'y', but compute returned only \['loss'\], and the batch has \['x', 'target'\]",
    ),
    (
        lambda: Evaluate(BATCH, metrics={"a": (METRIC, "x", "y"), "b": (METRIC, "z", "y")}),
        ValueError,
        "the metrics 'a' and 'b' are one object, which would be updated twice",
    ),
]


@pytest.mark.parametrize(("evaluate", "error", "message"), WRONG)
def test_what_cannot_be_evaluated_or_has_no_mean_or_no_name_of_its_own_is_an_error(
    evaluate: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluate()
