"""Weights & Biases in both versions: cases 21 of part F1 and 14 of part F2. The tests read wandb's offline file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core.callbacks import WandBLogger
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, WandbCallback
from tests.compat.nemo.graphs import SGD, Line, line, worst_of
from tests.compat.nemo.scripts import OFFLINE
from tests.sinks.wandb_file import WandbFile


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of offline files, which wandb reads once per process. Its service is ended after the last test."""
    import wandb

    wandb.teardown()  # tests of other files in this process may have set it up
    folder = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_DIR", str(folder))
        yield folder
        wandb.teardown()


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    yield
    wandb = sys.modules["wandb"]
    if wandb.run is not None:
        wandb.run.finish()


def finished(folder: Path) -> WandbFile:
    """End the session like the end of a script; return its records."""
    import wandb

    assert wandb.run is not None
    name = wandb.run.id
    wandb.run.finish()
    [file] = folder.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
    return WandbFile(file)


def config_of(found: WandbFile) -> dict[str, Any]:
    """Return the configuration, with later updates."""
    added = [item for record in found.records if record.HasField("config") for item in record.config.update]
    return found.config | {item.key: json.loads(item.value_json) for item in added}


def train(graph: Line, *callbacks: Any, **length: int) -> None:
    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, **length}, list(callbacks))


def rows_with(found: WandbFile, name: str) -> list[tuple[int, Any]]:
    return [(row["_step"], row[name]) for row in found.rows if name in row]


def test_f1_21_training_tensors_and_the_rate_every_25_steps_and_epochs(folder: Path) -> None:
    graph = line(20)
    arguments = argparse.Namespace(width=3, data="digits")
    callback = WandbCallback([graph.loss], wandb_name="mine", wandb_project="tests", args=arguments)
    train(graph, callback, max_steps=60)
    found = finished(folder)
    assert (found.run.display_name, found.run.project) == ("mine", "tests")
    assert {name: config_of(found)[name] for name in ("width", "data")} == {"width": 3, "data": "digits"}
    assert [step for step, _ in rows_with(found, "loss")] == [0, 25, 50]
    assert rows_with(found, "LR") == [(0, 0.1), (25, 0.1), (50, 0.1)]
    assert rows_with(found, "epoch") == [(20, 0), (40, 1), (60, 2)]
    assert len(rows_with(found, "epoch_time")) == 3


def test_f1_21_a_tensor_that_the_training_does_not_need_is_computed(folder: Path) -> None:
    graph = line(5)  # NeMo raises a KeyError
    worst, computed = worst_of(graph)
    train(graph, WandbCallback([worst], update_freq=2), max_steps=5)
    found = finished(folder)
    assert [step for step, _ in rows_with(found, "worst_error")] == [0, 2, 4]
    assert len(computed) == 3


@pytest.mark.parametrize("kind", ["old", "new", "evaluator"])
def test_f1_21_without_wandb_the_training_is_completed(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    graph = line(2)
    callbacks = {
        "old": WandbCallback([graph.loss]),
        "new": WandBLogger(),
        "evaluator": EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: {"a": 1}, wandb_name="n"),
    }
    factory = NeuralModuleFactory()
    run = factory.train([graph.loss], "sgd", {**SGD, "max_steps": 3}, [callbacks[kind]])
    assert run.progress.step == 3
    assert caplog.text.count("wandb is not installed") == 1
    monkeypatch.undo()


def test_f2_14_one_row_per_logged_step_and_one_per_epoch(folder: Path) -> None:
    train(line(2), WandBLogger(step_freq=2, wandb_name="mine", wandb_project="tests", args={"width": 3}), max_steps=4)
    found = finished(folder)
    rows = found.rows
    assert [(row["_step"], {name for name in row if name[0] != "_"}) for row in rows] == [
        (0, {"loss", "LR"}),
        (2, {"loss", "LR", "epoch", "epoch_time"}),  # values of one step are one row in the file
        (4, {"epoch", "epoch_time"}),
    ]
    assert [value for _, value in rows_with(found, "epoch")] == [0, 1]
    assert config_of(found)["width"] == 3


def test_f2_14_a_session_in_progress_is_used_and_its_configuration_is_unchanged(folder: Path) -> None:
    import wandb

    wandb.init(project="own", config={"width": 1})
    train(
        line(2), WandBLogger(step_freq=2, wandb_project="other", args={"width": 3}, log_epoch=False, log_lr=False), max_steps=4
    )
    found = finished(folder)
    assert (found.run.project, config_of(found)["width"]) == ("own", 1)
    assert [{name for name in row if name[0] != "_"} for row in found.rows] == [{"loss"}, {"loss"}]


def test_an_nmtensor_is_sent_under_its_name(folder: Path) -> None:
    graph = line(2)  # in NeMo its key is not a string
    worst, _ = worst_of(graph)
    train(graph, WandBLogger(1, [graph.loss, worst.unique_name], log_lr=False, log_epoch=False), max_steps=1)
    [row] = finished(folder).rows
    assert {name for name in row if name[0] != "_"} == {"loss", worst.unique_name}


def test_a_project_alone_sends_the_results_of_an_evaluation(folder: Path) -> None:
    graph = line(2)  # NeMo sends nothing
    evaluator = EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: {"score": 7}, eval_step=2, wandb_project="tests")
    train(graph, evaluator, max_steps=3)
    found = finished(folder)
    assert rows_with(found, "score") == [(0, 7), (2, 7), (3, 7)]


def test_an_evaluation_without_a_training_sends_results_too(folder: Path) -> None:
    graph = line(2)
    evaluator = EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: {"score": 7}, wandb_name="alone")
    NeuralModuleFactory().eval([evaluator])
    found = finished(folder)
    assert rows_with(found, "score") == [(0, 7)]


def test_a_failing_session_is_logged_once_and_the_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    import wandb

    graph = line(2)
    logger = WandBLogger(step_freq=1, wandb_project="tests")

    class Breaks(ActionCallback):
        def on_iteration_start(self) -> None:
            if self.step == 2 and wandb.run is not None:
                wandb.run.finish()  # simulates a failed service

    run = NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "max_steps": 5}, [Breaks(), logger])
    assert run.progress.step == 5
    assert caplog.text.count("wandb failed, so nothing more is sent to it") == 1


@pytest.mark.parametrize("frequency", [0, -2])
def test_a_wrong_frequency_is_an_error_in_the_constructor(frequency: int) -> None:
    with pytest.raises(ValueError, match="update_freq must be a whole number of at least 1, or -1 for never"):
        WandbCallback(update_freq=frequency)
