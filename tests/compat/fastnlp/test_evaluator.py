"""Judging a model: names of results, arguments by name, mappings; case 27."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cadenza.compat.fastnlp import Evaluator
from tests.compat.fastnlp.toy import Error, Rows, Toy, loader, rows


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


def test_a_result_of_none_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    assert evaluated({"none": Reports(None), "one": Reports(torch.tensor(1.0))}) == {"one": 1.0}
    assert "'none' returned None" in caplog.text


def test_metrics_are_reset_before_and_after_each_loader() -> None:
    metric = Reports(1)
    evaluated({"m": metric}, {"d1": loader(8), "d2": loader(8)})
    assert (metric.batches, metric.resets) == (4, 3)


def test_each_loader_may_be_limited() -> None:
    metric = Reports(1)
    evaluator = Evaluator(Toy(), {"d1": loader(20), "d2": loader(20)}, {"m": metric}, verbose=0)
    evaluator.run(num_eval_batch_per_dl=2)
    assert metric.batches == 4
    with pytest.raises(AssertionError, match="-1 or more than 0"):
        evaluator.run(num_eval_batch_per_dl=0)


def test_torchmetrics_are_accepted() -> None:
    class Judge(nn.Module):
        def evaluate_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"preds": x.sum(1, keepdim=True), "target": y}

    assert evaluated({"mae": torchmetrics.MeanAbsoluteError()}, model=Judge())["mae"] == pytest.approx(0.0, abs=1e-6)


def test_a_metric_gets_the_named_entries_of_outputs_and_batch() -> None:
    assert evaluated({"error": Error()})["error"] > 0.1  # pred is the model's, y the batch's


def test_a_name_in_both_must_be_the_same_object() -> None:
    class Same(Toy):
        def evaluate_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another batch
            return {"pred": self.linear(x), "y": y}

    class Other(Toy):
        def evaluate_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another batch
            return {"pred": self.linear(x), "y": y + 1}

    evaluated({"e": Error()}, model=Same())
    with pytest.raises(ValueError, match="two different values for it"):
        evaluated({"e": Error()}, model=Other())


def test_a_missing_argument_of_a_metric_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"needs \['y'\]; got \['pred', 'x'\]"):
        evaluated({"e": Error()}, input_mapping=lambda batch: {"x": batch["x"]})


def test_outputs_must_have_names_and_batches_need_not(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch

    with pytest.raises(RuntimeError, match="a dict or a dataclass from the model"):
        evaluated({"m": Reports(1)}, [torch.ones(2)], Bare())
    evaluated({"m": Reports(1)}, [torch.ones(2)], Bare(), output_mapping=lambda out: {"pred": out})
    assert "get no arguments from the batches" in caplog.text


@dataclass
class Output:
    pred: Tensor
    loss: Tensor | None = None


def test_a_dataclass_has_names() -> None:
    class Typed(Toy):
        def evaluate_step(self, x: Tensor) -> Output:  # type: ignore[override]  # another kind of output
            return Output(self.linear(x))

    assert evaluated({"e": Error()}, model=Typed()) == evaluated({"e": Error()})


def test_mappings_rename_the_parts_of_dicts_dataclasses_and_sequences() -> None:
    def pairs() -> list[tuple[Tensor, Tensor]]:
        return [(row["x"][None], row["y"][None]) for row in rows(8)]

    names = {"_0": "x", "_1": "y"}
    assert evaluated({"e": Error()}, pairs(), input_mapping=names)["e"] == pytest.approx(evaluated({"e": Error()})["e"])
    with pytest.raises(ValueError, match="a mapping of names needs"):
        evaluated({"e": Error()}, [torch.ones(1)], input_mapping=names)
    with pytest.raises(ValueError, match="must be a function, or a dict"):
        evaluated({}, input_mapping=3)


def test_a_missing_method_of_the_model_is_an_error_that_names_it() -> None:
    class Several(Toy):
        def other(self, x: Tensor) -> dict[str, Tensor]:
            return {"pred": 0 * self.linear(x)}

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"pred": 0 * x.sum(1, keepdim=True)}

    zero = sum(float(row["y"]) for row in rows(8)) / 8
    assert evaluated({"e": Error()}, model=Several(), evaluate_fn="other")["e"] == pytest.approx(zero)
    assert evaluated({"e": Error()}, model=Plain())["e"] == pytest.approx(zero)
    with pytest.raises(RuntimeError, match="no method 'missing'"):
        evaluated({}, evaluate_fn="missing")


def test_a_custom_function_may_do_the_step() -> None:
    def step(evaluator: Evaluator, batch: Any) -> None:
        evaluator.update(batch, {"pred": batch["y"]})

    assert evaluated({"e": Error()}, evaluate_batch_step_fn=step) == {"e": 0.0}
    with pytest.raises(TypeError, match="evaluate_batch_step_fn"):
        evaluated({}, evaluate_batch_step_fn=lambda evaluator: None)


def test_the_model_is_evaluated_without_gradient_and_its_mode_is_restored() -> None:
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


def test_an_evaluation_restores_the_rng_state() -> None:
    model = Toy()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    evaluated({"m": Reports(1)}, loader(8, shuffle=True), model)
    assert torch.equal(torch.rand(1), expected)


def test_results_are_printed_unless_verbose_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    Evaluator(Toy(), loader(4), {"m": Reports(0.5)}).run()
    assert capsys.readouterr().out == '{"m": 0.5}\n'


def test_wrong_arguments_are_errors(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="dataloaders must be a loader"):
        Evaluator(Toy())
    with pytest.raises(TypeError, match="metrics must be a dict"):
        evaluated([Reports(1)])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match=r"metrics\['m'\] must have update"):
        evaluated({"m": 3})
    with pytest.raises(ValueError, match="are aliases; got both"):
        evaluated({}, loader(4), evaluate_dataloaders=loader(4))
    Evaluator(Toy(), loader(4), {}, verbos=1)
    assert "Evaluator ignores the unknown argument verbos=. Did you mean 'verbose'?" in caplog.text
    assert "ignores the unknown argument verbos=" in caplog.text


def test_a_batch_may_be_passed_unchanged() -> None:
    class Whole(Toy):
        def evaluate_step(self, batch: Rows) -> dict[str, Tensor]:  # type: ignore[override]  # the whole batch
            return {"pred": self.linear(batch["x"])}  # type: ignore[call-overload]  # a dict of columns

    model = Whole()
    assert evaluated({"e": Error()}, model=model, model_wo_auto_param_call=True) == evaluated({"e": Error()})
