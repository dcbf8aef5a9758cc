"""Judging a model: names of results, arguments by name, mappings (case 27); and watching a result (case 22)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cadenza.callbacks import Evaluate
from cadenza.compat.fastnlp import Evaluator, ExecuteOnceBetterMonitor, HasMonitorCallback, ResultsMonitor
from cadenza.testing import tiny_loader, tiny_run
from tests.compat.fastnlp.toy import Error, Rows, Scripted, Toy, loader, rows, toy_trainer, trained


class Reports:
    """A metric that reports the same each time."""

    def __init__(self, value: Any) -> None:
        self.value, self.batches, self.resets = value, 0, 0

    def update(self, pred: Tensor) -> None:
        self.batches += 1

    def get_metric(self) -> Any:
        return self.value

    def reset(self) -> None:
        self.resets += 1


def evaluated(metrics: Mapping[str, Any], dataloaders: Any = None, model: nn.Module | None = None, **arguments: Any) -> Any:
    dataloaders = loader(8) if dataloaders is None else dataloaders
    return Evaluator(model or Toy(), dataloaders, metrics, verbose=0, **arguments).run()


def test_case_27_results_are_named_by_key_metric_and_loader() -> None:
    acc = {"acc": 0.5}
    assert evaluated({"acc": Reports(acc)}) == {"acc#acc": 0.5}
    both = evaluated({"m1": Reports(acc), "m2": Reports(acc)}, {"d1": loader(4), "d2": loader(4)})
    assert list(both) == ["acc#m1#d1", "acc#m2#d1", "acc#m1#d2", "acc#m2#d2"]
    assert evaluated({"z": Reports({"a": {"b": 1}})}) == {"b#a#z": 1}
    assert evaluated({"f": Reports(0.25)}, {"dev": loader(4)}) == {"f#dev": 0.25}
    assert evaluated({"f": Reports(acc)}, separator="/") == {"acc/f": 0.5}


def test_metrics_are_reset_before_and_after_each_loader_which_may_be_limited() -> None:
    metric = Reports(1)
    evaluator = Evaluator(Toy(), {"d1": loader(8), "d2": loader(8)}, {"m": metric}, verbose=0)
    evaluator.run()
    assert (metric.batches, metric.resets) == (4, 3)
    evaluator.run(num_eval_batch_per_dl=1)
    assert metric.batches == 4 + 2
    with pytest.raises(AssertionError, match="-1 or more than 0"):
        evaluator.run(num_eval_batch_per_dl=0)


def test_results_are_printed_unless_verbose_is_0_and_none_is_omitted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Evaluator(Toy(), loader(4), {"m": Reports(0.5)}).run()
    assert evaluated({"none": Reports(None), "one": Reports(torch.tensor(1.0))}) == {"one": 1.0}
    assert capsys.readouterr().out == '{"m": 0.5}\n'
    assert "'none' returned None" in caplog.text


@dataclass
class Output:
    pred: Tensor
    loss: Tensor | None = None


class Typed(Toy):
    def evaluate_step(self, x: Tensor) -> Output:  # type: ignore[override]  # another kind of output
        return Output(self.linear(x))


class Shadowing(Toy):
    """Returns the targets of the batch too, as they are or changed."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.change = change

    def evaluate_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another batch
        return {"pred": self.linear(x), "y": y + self.change if self.change else y}


class Whole(Toy):
    def evaluate_step(self, batch: Rows) -> dict[str, Tensor]:  # type: ignore[override]  # the whole batch
        return {"pred": self.linear(batch["x"])}  # type: ignore[call-overload]  # a dict of columns


class Plain(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"pred": 0 * x.sum(1, keepdim=True)}


class Bare(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


PAIRS = [(row["x"][None], row["y"][None]) for row in rows(8)]
NAMES = {"_0": "x", "_1": "y"}
ERROR = evaluated({"e": Error()})["e"]  # pred is the model's, y the batch's
ZERO = sum(float(row["y"]) for row in rows(8)) / 8


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Typed(), {}, ERROR),
        (Shadowing(0), {}, ERROR),
        (Whole(), {"model_wo_auto_param_call": True}, ERROR),
        (Toy(), {"dataloaders": PAIRS, "input_mapping": NAMES}, ERROR),
        (Plain(), {}, ZERO),
        (Plain(), {"evaluate_fn": "forward"}, ZERO),
        (Toy(), {"evaluate_batch_step_fn": lambda evaluator, batch: evaluator.update(batch, {"pred": batch["y"]})}, 0.0),
    ],
    ids=["dataclass", "same object in both", "whole batch", "mapping of names", "forward", "named method", "own step"],
)
def test_a_metric_gets_the_named_entries_of_outputs_and_batch(model: nn.Module, options: Any, expected: float) -> None:
    assert ERROR > 0.1
    assert evaluated({"e": Error()}, model=model, **options)["e"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": Shadowing(1)}, ValueError, "two different values for it"),
        ({"input_mapping": lambda batch: {"x": batch["x"]}}, ValueError, r"needs \['y'\]; got \['pred', 'x'\]"),
        ({"dataloaders": [torch.ones(2)], "model": Bare()}, RuntimeError, "a dict or a dataclass from the model"),
        ({"dataloaders": [torch.ones(1)], "input_mapping": NAMES}, ValueError, "a mapping of names needs"),
        ({"input_mapping": 3}, ValueError, "must be a function, or a dict"),
        ({"evaluate_fn": "missing"}, RuntimeError, "no method 'missing'"),
        ({"evaluate_batch_step_fn": lambda evaluator: None}, TypeError, "evaluate_batch_step_fn"),
        ({"metrics": [Reports(1)]}, TypeError, "metrics must be a dict"),
        ({"metrics": {"m": 3}}, TypeError, r"metrics\['m'\] must have update"),
        ({"evaluate_dataloaders": loader(4)}, ValueError, "are aliases; got both"),
    ],
)
def test_missing_and_contradictory_parts_are_errors(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluated(**{"metrics": {"e": Error()}, **arguments})


def test_batches_need_no_names_and_unknown_arguments_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    evaluated({"m": Reports(1)}, [torch.ones(2)], Bare(), output_mapping=lambda out: {"pred": out})
    assert "get no arguments from the batches" in caplog.text
    Evaluator(Toy(), loader(4), {}, verbos=1)
    assert "Evaluator ignores the unknown argument verbos=. Did you mean 'verbose'?" in caplog.text
    with pytest.raises(ValueError, match="dataloaders must be a loader"):
        Evaluator(Toy())


def test_torchmetrics_are_accepted_and_a_native_evaluation_can_be_monitored() -> None:
    class Judge(nn.Module):
        def evaluate_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"preds": x.sum(1, keepdim=True), "target": y}

    assert evaluated({"mae": torchmetrics.MeanAbsoluteError()}, model=Judge())["mae"] == pytest.approx(0.0, abs=1e-6)
    watching = Watching("loss", larger_better=False)
    run = tiny_run(callbacks=[Evaluate(tiny_loader(), sanity_batches=1), watching], epochs=2)
    assert [value for value, _ in watching.seen] == [value for _, value in run.history["eval/loss"]]
    assert watching.seen[0][1]


def test_the_model_is_evaluated_without_gradient_and_its_mode_and_the_rng_state_are_restored() -> None:
    class Looks(Toy):
        def evaluate_step(self, x: Tensor) -> dict[str, Tensor]:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().evaluate_step(x)

    modes: list[tuple[bool, bool]] = []
    model = Looks()
    model.linear.eval()
    evaluated({"m": Reports(1)}, model=model)
    evaluated({"m": Reports(1)}, model=model, model_use_eval_mode=False)
    assert modes == [(False, False)] * 2 + [(True, False)] * 2
    assert (model.training, model.linear.training) == (True, False)
    plain = Toy()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    evaluated({"m": Reports(1)}, loader(8, shuffle=True), plain)
    assert torch.equal(torch.rand(1), expected)


# -- monitors ----------------------------------------------------------------------------------------------


def results(*names: str) -> dict[str, Any]:
    """Return results with their names as values."""
    return {name: name for name in names}


@pytest.mark.parametrize(
    ("watched", "reported", "taken"),
    [
        ("acc", ("acc#acc",), "acc#acc"),
        ("f1", ("acc#acc", "f#f1", "pre#f1"), "f#f1"),
        ("acc#dev", ("acc#acc#test", "acc#acc#dev"), "acc#acc#dev"),
        ("-loss", ("acc#acc", "loss#loss"), "loss#loss"),
        ("acc#acc", ("loss#loss", "acc#acc"), "acc#acc"),
    ],
)
def test_case_22_the_name_with_the_longest_common_part_is_used(watched: str, reported: tuple[str, ...], taken: str) -> None:
    assert ResultsMonitor(watched).get_monitor_value(results(*reported)) == taken


def test_case_22_without_a_common_substring_there_is_no_value(caplog: pytest.LogCaptureFixture) -> None:
    """Deviation: fastNLP takes the first result."""
    assert ResultsMonitor("loss").get_monitor_value(results("x", "y")) is None
    assert "no result is similar to 'loss'" in caplog.text
    monitor = ResultsMonitor("ACC")
    assert monitor.get_monitor_value(results("b#b", "acc#acc")) is None


def test_case_22_the_last_used_name_is_used_again_and_a_warning_names_another(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ResultsMonitor("abc")
    assert monitor.get_monitor_value(results("ab")) == "ab"
    assert monitor.get_monitor_value(results("ab", "abcd")) == "ab"
    assert monitor.get_monitor_value(results("abc", "ab")) == "abc"
    monitor = ResultsMonitor("acc")
    caplog.clear()
    for reported in ("acc#acc", "acc#acc", "acc#dev"):
        monitor.get_monitor_value(results(reported))
    assert [line.rpartition("; ")[2] for line in caplog.messages] == ["using 'acc#acc'", "using 'acc#dev'"]


def test_case_22_equal_is_not_better_and_nan_and_none_never_are() -> None:
    monitor = ResultsMonitor("acc", larger_better=True)
    better = [monitor.is_better_monitor_value(value) for value in (0.1, 0.1, 0.2, math.nan, None, 0.1)]
    assert better == [True, False, True, False, False, False]
    smaller = ResultsMonitor("loss", larger_better=False)
    assert [smaller.is_better_results({"loss": torch.tensor(value)}) for value in (0.5, 0.6, 0.4)] == [True, False, True]
    assert smaller.monitor_value == pytest.approx(0.4)
    assert smaller.is_better_results({"loss": 0.3}, keep_if_better=False)
    assert smaller.is_better_results({"loss": 0.3})
    first = ResultsMonitor("acc").is_former_monitor_value_better
    assert [first(None, None), first(None, 0.1), first(0.1, None), first(0.2, 0.1)] == [True, False, True, True]


def score(results: dict[str, Any], weight: int) -> float:
    return float(weight * results["a"])


def test_a_function_of_the_results_is_a_monitor() -> None:
    monitor = ResultsMonitor(lambda results: results.get("a"), larger_better=False)
    named = ResultsMonitor(partial(score, weight=2))
    assert [monitor.get_monitor_value({"a": 2.0}), monitor.get_monitor_value({"b": 2.0})] == [2.0, None]
    assert monitor.get_monitor_value({}) is None
    assert named.monitor_name == "score"
    with pytest.raises(KeyError) as caught:
        named.get_monitor_value({"b": 1})
    assert "the monitor 'score' of ResultsMonitor" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="must accept one argument"):
        ResultsMonitor(lambda: 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="name of a result"):
        ResultsMonitor(3)  # type: ignore[arg-type]  # wrong on purpose


class Watching(HasMonitorCallback):
    """Notes each value, and whether it is better."""

    def __init__(self, monitor: Any = None, larger_better: bool = True, must_have_monitor: bool = False) -> None:
        super().__init__(monitor, larger_better, must_have_monitor)
        self.seen: list[tuple[Any, bool]] = []

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.seen.append((self.get_monitor_value(results), self.is_better_results(results)))


def test_case_22_each_training_starts_anew_without_its_sanity_check_and_improvements_call_a_function() -> None:
    watching = Watching("acc#acc")
    trained(8, watching, {"acc": Scripted(0.9, 0.1, 0.3, 0.2)}, n_epochs=3)
    assert watching.seen == [(0.1, True), (0.3, True), (0.2, False)]
    watching.seen.clear()
    trained(8, watching, {"acc": Scripted(0.0, 0.1)}, n_epochs=1)
    assert watching.seen == [(0.1, True)]
    calls: list[int] = []
    once = ExecuteOnceBetterMonitor("acc", True, lambda: calls.append(1))
    trained(8, once, {"acc": Scripted(0.0, 0.1, 0.5, 0.3, 0.7)}, n_epochs=4)
    assert len(calls) == 3


def test_callbacks_without_a_monitor_use_the_trainers() -> None:
    class Forgets(Watching):
        def on_after_trainer_initialized(self, trainer: Any, driver: Any) -> None:
            """Call no super, as fastNLP's own progress bars did."""

    own, none, forgets = Watching("acc"), Watching(), Forgets()
    metrics = {"acc": Scripted(0.9, 0.1, 0.3)}
    trained(8, [own, none, forgets], metrics, n_epochs=2, monitor="acc#acc", larger_better=False)
    assert own.seen == [(0.1, True), (0.3, True)]
    assert none.seen == forgets.seen == [(0.1, True), (0.3, False)]
    with pytest.raises(RuntimeError, match="Watching needs a monitor"):
        toy_trainer(8, [Watching(must_have_monitor=True)], {"acc": Scripted()})
    with pytest.raises(RuntimeError, match="nothing is evaluated"):
        toy_trainer(8, [Watching("acc", must_have_monitor=True)])
    assert toy_trainer(8, [Watching(must_have_monitor=True)], {"acc": Scripted()}, monitor="acc").evaluates
