"""NeMo 0.10, checkpoints: equivalence cases 14-18 of part F1. The tests of 0.11 cover the common parts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.compat.nemo10.core import CheckpointCallback, NeuralModuleFactory
from tests.compat.nemo.graphs import SGD, Line, genuine, line, names_in, steps_of
from tests.compat.nemo10.test_events import Trace


def train(graph: Line, *callbacks: Any, **length: int) -> None:
    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, **length}, list(callbacks))


def keep(folder: Path, **arguments: Any) -> CheckpointCallback:
    return CheckpointCallback(str(folder), **arguments)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and record.name == "nemo"]


@pytest.mark.parametrize(
    ("arguments", "length", "kind", "found"),
    [
        ({"step_freq": 2}, {"max_steps": 5}, "STEP", [2, 4, 5]),
        ({"epoch_freq": 1}, {"num_epochs": 3}, "EPOCH", [0, 1, 2, 3]),
        ({"epoch_freq": 2}, {"num_epochs": 5}, "EPOCH", [1, 3, 5]),
        ({"step_freq": 1, "checkpoints_to_keep": 0}, {"max_steps": 6}, "STEP", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_14_files_have_these_numbers_and_contents(
    arguments: dict[str, Any], length: dict[str, Any], kind: str, found: list[int], tmp_path: Path
) -> None:
    graph = line(2)
    train(graph, keep(tmp_path, **arguments), **length)
    assert names_in(tmp_path) == sorted(f"{name}-{kind}-{number}.pt" for name in ("LineNM", "trainer") for number in found)
    content = torch.load(tmp_path / f"trainer-{kind}-{found[-1]}.pt", weights_only=True)
    assert list(content) == ["step", "epoch_num", "optimizer_state", "cadenza"]
    assert content["step" if kind == "STEP" else "epoch_num"] == found[-1]
    weights = torch.load(tmp_path / f"LineNM-{kind}-{found[-1]}.pt", weights_only=True)
    assert list(weights.values()) == graph.weights


def test_15_the_last_two_are_kept_and_files_of_earlier_trainings_are_not_deleted(tmp_path: Path) -> None:
    train(line(2), keep(tmp_path / "a", step_freq=1, checkpoints_to_keep=2), max_steps=5)
    assert steps_of(tmp_path / "a") == [4, 5]
    train(line(2), keep(tmp_path / "a", step_freq=1, checkpoints_to_keep=2), max_steps=9)
    assert steps_of(tmp_path / "a") == [4, 8, 9]  # its first step is STEP-5, too


def test_15_one_instance_counts_each_training_separately(tmp_path: Path) -> None:
    callback = keep(tmp_path, step_freq=1, checkpoints_to_keep=2)
    for steps in (5, 9):
        train(line(2), callback, max_steps=steps)
    assert steps_of(tmp_path) == [4, 8, 9]


def test_16_force_load_needs_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        with pytest.raises(ValueError, match="force_load=True needs a checkpoint, but nothing could be restored"):
            train(line(2), keep(tmp_path / folder, step_freq=2, force_load=True), max_steps=2)
        trace = Trace()
        train(line(2), keep(tmp_path / folder, step_freq=9), trace, max_steps=2)
        assert trace.seen[-1] == ("on_action_end", 2, 1)
    assert sum(text.startswith("Nothing was restored") for text in warnings_in(caplog)) == 2


def test_16_with_module_files_only_weights_are_restored_and_steps_start_at_0(tmp_path: Path) -> None:
    before = line(2)
    train(before, keep(tmp_path, step_freq=2), max_steps=3)
    for file in tmp_path.glob("trainer*"):
        file.unlink()
    graph, seen = line(2), list[Any]()

    class Look(Trace):
        def on_action_start(self) -> None:
            seen.append((graph.weights == before.weights, self.step))

    train(graph, keep(tmp_path, step_freq=2, force_load=True), Look(), max_steps=1)
    assert seen == [(True, 0)]


def test_17_weights_that_do_not_fit_are_a_warning_and_the_current_ones_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    genuine(tmp_path, "STEP-3", 3, 1, "epoch_num")
    torch.save({"layer.weight": torch.full((1, 1), 9.0), "layer.bias": torch.ones(5)}, tmp_path / "LineNM-STEP-3.pt")
    trace, graph = Trace(), line(2)
    train(graph, keep(tmp_path, step_freq=9), trace, max_steps=2)
    assert trace.seen[0] == ("on_action_start", 0, 0)
    assert "Weights were not restored" in caplog.text
    fresh = line(2)
    train(fresh, max_steps=2)
    assert graph.weights == fresh.weights


def test_18_step_freq_has_precedence_over_epoch_freq(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(line(2), keep(tmp_path, step_freq=2, epoch_freq=1), max_steps=3)
    assert (steps_of(tmp_path), steps_of(tmp_path, "EPOCH")) == ([2, 3], [])
    assert "Both step_freq and epoch_freq were given" in caplog.text


def test_18_without_a_frequency_nothing_is_written_and_one_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = keep(tmp_path)
    train(line(2), callback, max_steps=3)
    assert names_in(tmp_path) == []
    assert sum(text.startswith("No checkpoints will be saved") for text in warnings_in(caplog)) == 1


def test_each_version_reads_the_files_of_the_other(tmp_path: Path) -> None:
    from cadenza.compat.nemo.core import CheckpointCallback as Newer

    train(line(2), keep(tmp_path / "a", step_freq=2), max_steps=3)
    train(line(2), Newer(str(tmp_path / "b"), step_freq=2), max_steps=3)
    for folder, callback in (("a", Newer(str(tmp_path / "a"))), ("b", keep(tmp_path / "b"))):
        trace = Trace()
        train(line(2), callback, trace, max_steps=5)
        assert trace.seen[0] == ("on_action_start", 3, 1), folder
