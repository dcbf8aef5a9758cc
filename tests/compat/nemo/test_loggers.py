"""NeMo 0.11, loggers: equivalence cases 11-14 of part F2."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from cadenza.compat.nemo.core import NeuralModuleFactory, NmTensor
from cadenza.compat.nemo.core.callbacks import SimpleLogger, TensorboardLogger
from cadenza.testing import tiny_trainer
from tests.compat.nemo.graphs import SGD, Line, line, numbers, worst_of, written


def train(graph: Line, *callbacks: Any, steps: int = 4, factory: NeuralModuleFactory | None = None) -> None:
    params = {**SGD, "max_steps": steps}
    (factory or NeuralModuleFactory()).train([graph.loss], optimization_params=params, callbacks=list(callbacks))


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "nemo"]


@pytest.fixture
def factory(tmp_path: Path) -> NeuralModuleFactory:
    return NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)


def test_11_the_loss_is_printed_at_each_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    train(line(), SimpleLogger(step_freq=1))
    found = lines_of(caplog)
    assert len(found) == 4
    assert all(text.startswith("loss: ") and float(text.removeprefix("loss: ")) > 0 for text in found)


def test_11_names_and_nmtensors_are_logged_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    graph = line()
    graph.loss.rename("test_name")
    extra, _ = worst_of(graph)
    train(graph, SimpleLogger(step_freq=1, tensors_to_log=["test_name", extra]))
    assert [text.partition(":")[0] for text in lines_of(caplog)] == ["test_name", "worst_error"] * 4


def test_11_the_loss_is_shown_on_the_screen_in_a_native_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_trainer(callbacks=[SimpleLogger(step_freq=2)], steps=4).fit()
    shown = [text for text in capsys.readouterr().out.splitlines() if text.startswith("[NeMo I ")]
    assert [text.partition("] ")[2].partition(":")[0] for text in shown] == ["loss", "loss"]


def test_two_tensors_with_one_name_are_distinguished(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    graph = line()
    first, second = worst_of(graph)[0], worst_of(graph)[0]
    train(graph, SimpleLogger(1, ["loss", graph.loss, first, second]), steps=1)
    names = [text.rpartition(":")[0] for text in lines_of(caplog)]
    assert names == ["loss", graph.loss.unique_name, "worst_error", second.unique_name]


def test_12_scalars_the_rate_and_epochs_are_written_in_this_order(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    train(line(2), TensorboardLogger(factory.tb_writer, step_freq=2), factory=factory)
    ends = [("misc/epoch", 2), ("misc/epoch_time", 2), ("loss", 2), ("param/lr", 2), ("misc/epoch", 4), ("misc/epoch_time", 4)]
    assert written(tmp_path / "tensorboard") == [("loss", 0), ("param/lr", 0), *ends]
    assert numbers(tmp_path / "tensorboard", "misc/epoch") == [0, 1]
    assert numbers(tmp_path / "tensorboard", "param/lr") == pytest.approx([0.1, 0.1])


def test_12_rate_and_epochs_can_be_turned_off(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    logger = TensorboardLogger(factory.tb_writer, step_freq=2, log_epoch=False, log_lr=False)
    train(line(2), logger, factory=factory)
    assert written(tmp_path / "tensorboard") == [("loss", 0), ("loss", 2)]


def test_12_a_custom_function_replaces_the_scalars(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph, seen = line(2), list[tuple[Any, ...]]()
    logger = TensorboardLogger(
        factory.tb_writer,
        step_freq=2,
        tensors_to_log=["loss", graph.prediction],
        custom_tb_log_func=lambda values, writer, step: seen.append(([len(v.shape) for v in values], writer, step)),
    )
    train(graph, logger, factory=factory)
    assert seen == [([0, 2], factory.tb_writer, 0), ([0, 2], factory.tb_writer, 2)]
    assert ("loss", 0) not in written(tmp_path / "tensorboard")
    assert ("param/lr", 0) in written(tmp_path / "tensorboard")


def test_12_nmtensors_and_unique_names_are_accepted_as_documented(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)  # NeMo raises a TypeError in the writer
    worst, _ = worst_of(graph)
    entries: list[str | NmTensor] = [graph.loss, worst.unique_name]
    train(graph, TensorboardLogger(factory.tb_writer, 2, entries, log_lr=False, log_epoch=False), factory=factory)
    assert written(tmp_path / "tensorboard") == [(name, step) for step in (0, 2) for name in ("loss", worst.unique_name)]


def test_12_a_missing_writer_is_an_error_in_the_constructor() -> None:
    with pytest.raises(TypeError, match=r"tb_writer must be a SummaryWriter, such as nf\.tb_writer"):
        TensorboardLogger(NeuralModuleFactory().tb_writer)


def test_13_by_default_every_100th_step_is_logged(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    train(line(), TensorboardLogger(factory.tb_writer, log_epoch=False, log_lr=False), steps=150, factory=factory)
    assert written(tmp_path / "tensorboard") == [("loss", 0), ("loss", 100)]


@pytest.mark.parametrize("step_freq", [0, -2, 1.5])
def test_a_wrong_frequency_is_an_error_in_the_constructor(step_freq: Any) -> None:
    with pytest.raises(ValueError, match="step_freq must be a whole number of at least 1, or -1 for never"):
        SimpleLogger(step_freq)


def test_frequency_minus_1_means_never(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    train(line(), SimpleLogger(-1))
    assert lines_of(caplog) == []


def test_the_file_of_another_writer_is_complete_right_after_the_training(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    train(line(), TensorboardLogger(writer, step_freq=1, log_epoch=False, log_lr=False), steps=30)
    assert written(tmp_path) == [("loss", step) for step in range(30)]
    writer.close()


def test_a_training_by_the_name_of_an_optimizer_gives_no_hint_that_a_script_cannot_follow(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("sgd", "adam", "adamw", "adagrad"):
        NeuralModuleFactory().train([line().loss], name, {"lr": 0.01, "max_steps": 1}, [SimpleLogger()])
    assert "fused" not in caplog.text + capfd.readouterr().err
