"""NeMo 0.10 and 0.11, evaluation: equivalence cases 8-13 of part F1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadenza.compat.nemo10.backends.pytorch.nm import DataLayerNM, LossNM
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, NeuralModuleFactory, NmTensor
from cadenza.testing import Recorder, tiny_loader
from tests.compat.nemo.graphs import Line, LineNM, line, numbers, train_0_10, written


class Evaluated:
    """An evaluation of a line on three other batches, and the arguments of its functions."""

    def __init__(self, graph: Line, **arguments: Any) -> None:
        x, y = DataLayerNM.of(tiny_loader(3), ["x", "y"])()
        self.prediction: NmTensor = graph.net(x=x)
        self.loss: NmTensor = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=self.prediction, b=y)
        self.seen: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.result: Any = lambda kept: {"val_loss": torch.stack(kept["losses"]).mean()}
        self.callback = EvaluatorCallback([self.loss, self.prediction], self.gather, self.done, **arguments)

    def gather(self, values: dict[str, Any], kept: dict[str, Any]) -> None:
        self.seen.append(values)
        kept.setdefault("losses", []).append(values[self.loss.unique_name][0])

    def done(self, kept: dict[str, Any]) -> Any:
        self.kept.append(kept)
        return self.result(kept)


@pytest.fixture
def factory(tmp_path: Path) -> NeuralModuleFactory:
    return NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)


def logged(tmp_path: Path, tag: str = "val_loss") -> list[int]:
    return [step for name, step in written(tmp_path / "tensorboard") if name == tag]


@pytest.mark.parametrize(
    ("given", "max_steps", "logged_at"),
    [
        ({"eval_step": 2}, 5, [0, 2, 4, 5]),
        ({"eval_step": 2, "eval_at_start": False}, 5, [2, 4, 5]),
        ({"eval_step": None, "eval_epoch": 2}, 9, [4, 8, 9]),  # NeMo ignores it and fails with eval_step=None
    ],
)
def test_08_every_second_step_or_epoch_and_at_the_end(
    given: dict[str, Any], max_steps: int, logged_at: list[int], factory: NeuralModuleFactory, tmp_path: Path
) -> None:
    graph = line(2)
    evaluated = Evaluated(graph, tb_writer=factory.tb_writer, **given)
    train_0_10(graph, evaluated.callback, factory=factory, max_steps=max_steps)
    assert (len(evaluated.seen), len(evaluated.kept)) == (3 * len(logged_at), len(logged_at))
    assert logged(tmp_path) == logged_at
    last = sum(nn.functional.mse_loss(graph.net(x), y).item() for x, y in tiny_loader(3)) / 3
    assert numbers(tmp_path / "tensorboard", "val_loss")[-1] == pytest.approx(last)


def test_09_values_are_lists_of_one_tensor_under_unique_names_and_found_by_name_too() -> None:
    graph = line(2)
    evaluated = Evaluated(graph, eval_step=2)
    evaluated.loss.rename("evaluated")
    train_0_10(graph, evaluated.callback, max_steps=5)
    values = evaluated.seen[0]
    assert list(values) == [evaluated.loss.unique_name, evaluated.prediction.unique_name, "IS_FROM_DIST_EVAL"]
    assert values["IS_FROM_DIST_EVAL"] is False
    assert [len(values[tensor.unique_name]) for tensor in (evaluated.loss, evaluated.prediction)] == [1, 1]
    # The document promises plain names; NeMo itself has unique ones only.
    assert values["evaluated"] is values[evaluated.loss.unique_name] is values.get("evaluated")
    assert "y_pred" in values
    assert values.get("nothing", 3) == 3
    with pytest.raises(KeyError, match="no tensor 'nothing' is evaluated"):
        values["nothing"]
    assert [len(kept["losses"]) for kept in evaluated.kept] == [3, 3, 3, 3]  # each evaluation has its own dict


def test_10_none_logs_nothing_and_a_custom_function_writes_all(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph, seen = line(2), list[tuple[Any, ...]]()
    silent = Evaluated(graph, tb_writer=factory.tb_writer, eval_step=2)
    silent.result = lambda kept: None
    custom = Evaluated(
        graph,
        tb_writer=factory.tb_writer,
        tb_writer_func=lambda writer, result, step: seen.append((writer, result, step)),
        eval_step=3,
    )
    custom.result = lambda kept: ["anything"]  # NeMo's own type is a dict
    train_0_10(graph, silent.callback, custom.callback, factory=factory, max_steps=5)
    assert seen == [(factory.tb_writer, ["anything"], step) for step in (0, 3, 5)]
    assert {tag for tag, _ in written(tmp_path / "tensorboard")} == {"param/lr"}


def test_12_eval_evaluates_once_and_logs_at_step_0(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)
    evaluated = Evaluated(graph, tb_writer=factory.tb_writer)
    before = graph.weights
    factory.eval([evaluated.callback])
    assert (len(evaluated.seen), len(evaluated.kept), logged(tmp_path)) == (3, 1, [0])
    assert graph.weights == before
    untrained = sum(nn.functional.mse_loss(0.5 * x, y).item() for x, y in tiny_loader(3)) / 3
    assert numbers(tmp_path / "tensorboard", "val_loss") == pytest.approx([untrained])


def test_wrong_arguments_functions_and_results_are_errors() -> None:
    arguments: dict[str, Any]
    for arguments in ({"eval_step": 0}, {"eval_step": None}, {"eval_epoch": 0}, {"eval_step": -1}):
        with pytest.raises(ValueError, match=r"eval_(step|epoch) must be at least 1|expected eval_step or eval_epoch"):
            Evaluated(line(), **arguments)
    factory = NeuralModuleFactory()
    with pytest.raises(TypeError, match="eval accepts only EvaluatorCallbacks"):
        factory.eval([ActionCallback()])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ValueError, match="at least one EvaluatorCallback"):
        factory.eval([])
    with pytest.raises(TypeError, match=r"callbacks must be a list; got .* Write callbacks=\[\.\.\.\]"):
        factory.eval(Evaluated(line()).callback)  # type: ignore[arg-type]  # the mistake under test

    graph = line(2)
    with pytest.raises(TypeError, match="user_epochs_done_callback must be a function; got None"):
        EvaluatorCallback([graph.loss], print, None)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TypeError, match=r"eval_tensors must be a list of NmTensors, .*; got \['loss'\]"):
        EvaluatorCallback(["loss"], print, print)  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(TypeError, match="must return a dict of numbers, or None; got 3"):
        NeuralModuleFactory().eval([EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: 3)])  # type: ignore[arg-type,return-value]


def test_13_modules_are_in_evaluation_mode_and_no_event_is_called() -> None:
    graph, events = line(2), list[str]()
    evaluated = Evaluated(graph, eval_step=2)

    class Ear(ActionCallback):
        def on_iteration_start(self) -> None:
            events.append("start")

        def on_iteration_end(self) -> None:
            events.append("end")

    native = Recorder()
    train_0_10(graph, Ear(), evaluated.callback, native, max_steps=3)
    assert isinstance(graph.net, LineNM)
    assert graph.net.modes == [True, *[False] * 3, True, True, *[False] * 6]
    assert events == ["start", "end"] * 3
    assert native.names.count("on_eval_start") == 3  # native callbacks have this moment


def test_13_modules_that_the_training_does_not_use_are_in_evaluation_mode_too() -> None:
    graph, judge = line(2), LineNM()
    x, _ = DataLayerNM.of(tiny_loader(3), ["x", "y"])()
    evaluated: NmTensor = judge(x=x)
    callback = EvaluatorCallback([evaluated], lambda v, g: None, lambda g: None, eval_step=9, eval_at_start=False)
    train_0_10(graph, callback, max_steps=1)
    assert judge.modes == [False] * 3
    assert judge.training


def test_two_evaluators_have_separate_results_which_reach_the_history_of_the_run() -> None:
    graph = line(2)
    one, other = Evaluated(graph, eval_step=2), Evaluated(graph, eval_step=3)
    other.callback.name = "other"
    other.result = lambda kept: {"score": np.float32(0.5)}
    run = train_0_10(graph, one.callback, other.callback, max_steps=5)
    assert [len(evaluated.kept) for evaluated in (one, other)] == [4, 3]  # after steps 0, 2, 4 and 0, 3; and at the end
    assert [step for step, _ in run.history["EvaluatorCallback/val_loss"]] == [1, 3, 5, 5]
    assert [value for _, value in run.history["other/score"]] == [0.5] * 3


def test_evaluations_do_not_change_the_bits_of_the_training() -> None:
    def trained(evaluate: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = LineNM()
        net.layer = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))  # type: ignore[assignment]  # a larger one
        graph = line(3, net=net)
        callbacks = [Evaluated(graph, eval_step=2).callback] if evaluate else []
        train_0_10(graph, *callbacks, factory=NeuralModuleFactory(random_seed=1), max_steps=5)
        return list(net.state_dict().values())

    assert all(map(torch.equal, trained(evaluate=True), trained(evaluate=False)))


class Streamed(DataLayerNM):
    """A data layer with a new iterator for each evaluation. It uses names that the base class could use, too."""

    loader, execute, defaults, type = [(torch.ones(2, 1), torch.ones(2, 1))] * 3, 1, 2, "mine"

    @property
    def output_ports(self) -> dict[str, None]:
        return {"x": None, "y": None}

    @property
    def data_iterator(self) -> Any:
        return iter(self.loader)


def test_each_evaluation_reads_the_data_iterator_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nemo")
    graph, counts = line(2), list[int]()
    x, _ = Streamed()()
    evaluation = EvaluatorCallback(
        [graph.net(x=x)],
        lambda values, kept: kept.update(batches=kept.get("batches", 0) + 1),
        lambda kept: counts.append(kept["batches"]),
    )
    train_0_10(graph, evaluation, max_steps=2)
    assert counts == [3, 3, 3]
    assert [text.split()[0] for text in caplog.messages if "Evaluation ..." in text] == ["Doing", "Doing", "Final"]


def test_an_evaluation_that_fails_shows_its_error_and_logs_nothing(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)
    evaluated = Evaluated(graph)

    def fail(values: dict[str, Any], kept: dict[str, Any]) -> None:
        evaluated.gather(values, kept)
        if len(kept["losses"]) == 2:
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        train_0_10(
            graph, EvaluatorCallback([evaluated.loss], fail, evaluated.done, factory.tb_writer), factory=factory, max_steps=5
        )
    assert logged(tmp_path) == []
    assert evaluated.kept == []
    assert graph.net.training
