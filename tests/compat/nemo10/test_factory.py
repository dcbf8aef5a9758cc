"""NeMo 0.10: NaN losses, and the folders of a factory; equivalence cases 19 and 20 of part F1."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from cadenza.compat.nemo10 import logging
from cadenza.compat.nemo10.core import NeuralModuleFactory
from tests.compat.nemo.graphs import SGD, line, spoiled
from tests.compat.nemo10.test_events import Trace


def test_19_a_batch_with_a_nan_loss_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    graph, trace = line(loader=spoiled(5, 1)), Trace()
    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "num_epochs": 1}, [trace])
    assert trace.seen[-1] == ("on_action_end", 5, 1)
    assert all(bool(weight.isfinite().all()) for weight in graph.weights)
    assert "Loss is NaN or inf: it is nan at step 1; the batch is skipped" in caplog.text


def test_19_stop_on_nan_loss_stops_a_single_process_too() -> None:
    graph = line(loader=spoiled(5, 1))
    with pytest.raises(ValueError, match="Loss is NaN or inf"):  # 0.10.1 continues with NaN weights
        NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "num_epochs": 1}, stop_on_nan_loss=True)


def test_20_without_folders_nothing_is_written() -> None:
    factory = NeuralModuleFactory()
    assert (factory.work_dir, factory.checkpoint_dir, factory.tb_writer) == (None, None, None)
    assert (factory.world_size, factory.global_rank) == (1, None)


def test_20_the_work_directory_holds_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = types.SimpleNamespace(stdout="commit hash: abc\n")  # the tests may run outside a repository
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    extra = tmp_path / "config.yaml"
    extra.write_text("lr: 1")
    factory = NeuralModuleFactory(log_dir=str(tmp_path / "work"), create_tb_writer=True, files_to_copy=[str(extra)])
    assert factory.work_dir == str(tmp_path / "work")
    assert factory.checkpoint_dir == str(tmp_path / "work" / "checkpoints")
    assert isinstance(factory.tb_writer, SummaryWriter)
    logging.info("a message")
    names = {file.name.split("_")[0] for file in (tmp_path / "work").iterdir()}
    assert names >= {"checkpoints", "tensorboard", "cmd-args", "log", "config"}
    [arguments] = (tmp_path / "work").glob("cmd-args_*.log")
    assert arguments.read_text() == " ".join(sys.argv) + "\n"
    [of_git] = (tmp_path / "work").glob("git-info_*.log")
    assert of_git.read_text().startswith("commit hash: abc")
    [copied] = (tmp_path / "work").glob("config_*.yaml")
    assert copied.read_text() == "lr: 1"
    assert "a message" in (tmp_path / "work" / "log_globalrank-0_localrank-0.txt").read_text()


def test_20_each_folder_can_be_chosen(tmp_path: Path) -> None:
    factory = NeuralModuleFactory(
        log_dir=str(tmp_path / "work"),
        checkpoint_dir=str(tmp_path / "ck"),
        tensorboard_dir=str(tmp_path / "tb"),
        create_tb_writer=True,
    )
    assert factory.checkpoint_dir == str(tmp_path / "ck")
    assert factory.tb_writer.log_dir == str(tmp_path / "tb")
    assert not (tmp_path / "work" / "checkpoints").exists()
    assert NeuralModuleFactory(checkpoint_dir=str(tmp_path / "only")).checkpoint_dir == str(tmp_path / "only")


def test_20_a_folder_may_be_named_by_the_time(tmp_path: Path) -> None:
    factory = NeuralModuleFactory(log_dir=str(tmp_path), add_time_to_log_dir=True)
    [folder] = tmp_path.iterdir()
    assert factory.work_dir == str(folder)
    assert factory.checkpoint_dir == str(folder / "checkpoints")


def test_20_a_writer_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="create_tb_writer=True needs log_dir= or tensorboard_dir="):
        NeuralModuleFactory(create_tb_writer=True)


def test_messages_are_written_to_the_folder_of_the_newest_factory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        NeuralModuleFactory(log_dir=str(tmp_path / name))
        logging.info("said after %s", name)
    texts = [(tmp_path / name / "log_globalrank-0_localrank-0.txt").read_text() for name in ("a", "b")]
    assert ["said after a" in texts[0], "said after b" in texts[0], "said after b" in texts[1]] == [True, False, True]
