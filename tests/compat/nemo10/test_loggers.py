"""NeMo 0.10, the logger of losses: equivalence cases 4-7 of part F1."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from cadenza.compat.nemo10.backends.pytorch.nm import LossNM
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, NeuralModuleFactory, SimpleLossLoggerCallback
from tests.compat.nemo.graphs import SGD, Line, line, numbers, worst_of, written


def train(graph: Line, *callbacks: Any, factory: NeuralModuleFactory | None = None, steps: int = 3) -> None:
    (factory or NeuralModuleFactory()).train([graph.loss], "sgd", {**SGD, "max_steps": steps}, list(callbacks))


@pytest.fixture
def factory(tmp_path: Path) -> NeuralModuleFactory:
    return NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)


def test_04_print_func_gets_the_tensors_in_the_given_order() -> None:
    graph, seen = line(2), list[list[Tensor]]()
    train(graph, SimpleLossLoggerCallback([graph.prediction, graph.loss], print_func=seen.append, step_freq=2))
    assert [[tuple(one.shape) for one in tensors] for tensors in seen] == [[(2, 1), ()], [(2, 1), ()]]


def test_04_a_single_tensor_needs_no_list() -> None:
    graph, seen = line(2), list[Any]()
    train(graph, SimpleLossLoggerCallback(graph.loss, print_func=seen.append, step_freq=2))
    assert [len(tensors) for tensors in seen] == [1, 1]


def test_05_all_is_written_in_this_order_and_the_writer_is_closed(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)
    logger = SimpleLossLoggerCallback(
        [graph.loss], get_tb_values=lambda values: [("Train_Loss", values[0])], step_freq=2, tb_writer=factory.tb_writer
    )
    train(graph, logger, factory=factory)
    of_the_loop = [("param/lr", 0), ("param/lr", 1), ("param/lr", 2)]
    found = written(tmp_path / "tensorboard")
    assert [one for one in found if one not in of_the_loop] == [
        ("Train_Loss", 0),
        ("misc/step_time", 0),
        ("misc/epoch", 2),
        ("misc/epoch_time", 2),
        ("Train_Loss", 2),
        ("misc/step_time", 2),
        ("misc/epoch", 3),
        ("misc/epoch_time", 3),
    ]
    assert [one for one in found if one[0] == "param/lr"] == of_the_loop
    assert numbers(tmp_path / "tensorboard", "misc/epoch") == [0, 1]
    assert factory.tb_writer.file_writer is None  # closed


def test_05_the_rate_is_written_for_each_batch_without_callbacks_too(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    factory.train(
        [line(4).loss], "sgd", {**SGD, "num_epochs": 1}, batches_per_step=2, lr_policy=lambda lr, step, _: lr / (step + 1)
    )
    assert written(tmp_path / "tensorboard") == [("param/lr", 0), ("param/lr", 0), ("param/lr", 1), ("param/lr", 1)]
    assert numbers(tmp_path / "tensorboard", "param/lr") == pytest.approx([0.1, 0.1, 0.05, 0.05])


def test_06_both_functions_for_the_writer_are_called_and_plain_numbers_are_accepted(
    factory: NeuralModuleFactory, tmp_path: Path
) -> None:
    graph, seen = line(2), list[tuple[str, int]]()

    def values(tensors: list[Tensor]) -> list[tuple[str, Any]]:
        seen.append(("values", -1))
        return [("loss", tensors[0]), ("plain", 0.5)]  # NeMo raises an AttributeError for a plain number

    def write(writer: Any, tensors: list[Tensor], step: int) -> None:
        assert writer is factory.tb_writer
        seen.append(("write", step))

    logger = SimpleLossLoggerCallback(graph.loss, None, values, write, step_freq=2, tb_writer=factory.tb_writer)
    train(graph, logger, factory=factory)
    assert seen == [("values", -1), ("write", 0), ("values", -1), ("write", 2)]
    assert numbers(tmp_path / "tensorboard", "plain") == [0.5, 0.5]


def test_07_a_second_loss_logger_is_an_error_before_the_training() -> None:
    graph = line(2)
    before = graph.weights
    with pytest.raises(ValueError, match="expected at most one SimpleLossLoggerCallback"):
        train(graph, SimpleLossLoggerCallback(graph.loss), SimpleLossLoggerCallback(graph.loss))
    assert graph.weights == before


def test_a_tensor_that_the_training_does_not_need_is_computed_at_logged_steps_only() -> None:
    graph, seen = line(5), list[float]()
    worst, computed = worst_of(graph)
    train(graph, SimpleLossLoggerCallback(worst, lambda tensors: seen.append(tensors[0].item()), step_freq=2), steps=5)
    assert len(computed) == len(seen) == 3


def test_starts_ends_and_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    graph = line(2)
    train(graph, SimpleLossLoggerCallback(graph.loss, step_freq=2), steps=2)
    said = [" ".join(part for part in record.getMessage().split() if not part[0].isdigit()) for record in caplog.records]
    assert said == [
        "Starting .....",
        "Starting epoch",
        "Step:",
        "Step time: seconds",
        "Finished epoch in seconds",
        "Done in seconds",
    ]


def test_events_that_other_callbacks_write_at_the_end_are_on_the_disk(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)
    logger = SimpleLossLoggerCallback(graph.loss, step_freq=2, tb_writer=factory.tb_writer)
    evaluator = EvaluatorCallback([graph.loss], lambda v, g: g.update(n=1), lambda g: g, factory.tb_writer, eval_step=9)
    train(graph, logger, evaluator, factory=factory)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert ("n", 3) in written(tmp_path / "tensorboard")


def test_after_an_error_the_writer_is_closed_as_well(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    class Fail(ActionCallback):
        def on_iteration_end(self) -> None:
            raise ArithmeticError("on purpose")

    graph = line(2)
    logger = SimpleLossLoggerCallback(
        graph.loss, get_tb_values=lambda values: [("Train_Loss", values[0])], tb_writer=factory.tb_writer
    )
    with pytest.raises(ArithmeticError):
        train(graph, logger, Fail(), factory=factory)
    assert ("Train_Loss", 0) in written(tmp_path / "tensorboard")


def test_sounds_and_images_are_written(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)

    def write(writer: Any, tensors: list[Tensor], step: int) -> None:
        writer.add_audio("tone", torch.linspace(-1, 1, 100), step, sample_rate=8000)
        writer.add_image("dots", torch.eye(4).unsqueeze(0), step)

    train(graph, SimpleLossLoggerCallback(graph.loss, log_to_tb_func=write, step_freq=2, tb_writer=factory.tb_writer))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.sample_rate, one.length_frames) for one in events.Audio("tone")] == [(0, 8000, 100), (2, 8000, 100)]
    assert [(one.step, one.width) for one in events.Images("dots")] == [(0, 4), (2, 4)]


def test_a_missing_writer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    graph = line(2)
    train(graph, SimpleLossLoggerCallback(graph.loss, get_tb_values=lambda values: [("Train_Loss", values[0])]))
    assert caplog.text.count("nothing is written to TensorBoard: tb_writer is None") == 1


@pytest.mark.parametrize("step_freq", [0, -1])
def test_a_wrong_frequency_is_an_error_in_the_constructor(step_freq: int) -> None:
    with pytest.raises(ValueError, match="step_freq must be a whole number of at least 1"):
        SimpleLossLoggerCallback("loss", step_freq=step_freq)


def test_a_tensor_outside_of_the_training_is_computed_before_the_update() -> None:
    graph, seen = line(4), list[list[torch.Tensor]]()
    again = graph.net(x=graph.x)  # the trained module, used once more
    train(graph, SimpleLossLoggerCallback([graph.prediction, again], print_func=seen.append, step_freq=1), steps=4)
    assert len(seen) == 4
    assert all(torch.equal(trained, logged) for trained, logged in seen)


def test_a_module_may_compute_gradients_for_a_logged_tensor() -> None:
    graph, seen = line(4), list[float]()

    def slope(x: torch.Tensor) -> torch.Tensor:
        point = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(graph.net(point).sum(), point)
        return gradient.mean()

    penalty = LossNM.of(slope, ["x"])(x=graph.x)
    train(graph, SimpleLossLoggerCallback(penalty, print_func=lambda values: seen.append(values[0].item()), step_freq=1))
    assert seen[0] == 0.5  # the weight of the line at the start
    assert len(set(seen)) == len(seen)
