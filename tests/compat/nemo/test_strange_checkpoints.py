"""Checkpoint files that this run did not write: NeMo's own, damaged ones, malicious ones, those of another training."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import LossNM
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from tests.compat.nemo.graphs import SGD, NetNM, genuine, line, names_in
from tests.compat.nemo.test_checkpoints import keep, train
from tests.compat.nemo.test_events import Trace


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("which", ["LineNM", "trainer"])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_with_pickled_code_is_an_error_and_the_code_does_not_run(which: str, legacy: bool, tmp_path: Path) -> None:
    folder, target = tmp_path / "checkpoints", tmp_path / "was here"
    genuine(folder, "STEP-3", 3, 1)
    evil = {"step": 3, "optimizer_state": [], "layer.weight": Evil(target)}
    torch.save(evil, folder / f"{which}-STEP-3.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match="is damaged, or holds pickled code"):
        train(line(2), keep(folder), max_steps=5)
    assert not target.exists()
    torch.load(folder / f"{which}-STEP-3.pt", weights_only=False)  # here the code runs
    assert target.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut short"])
def test_a_damaged_file_of_nemo_is_an_error_and_a_damaged_one_of_ours_falls_back_to_an_older_one(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    genuine(tmp_path / "theirs", "STEP-3", 3, 1)
    (tmp_path / "theirs" / "LineNM-STEP-3.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"LineNM-STEP-3.pt is damaged, or holds"):
        train(line(2), keep(tmp_path / "theirs"), max_steps=5)
    train(line(2), keep(tmp_path / "ours", step_freq=2), max_steps=5)
    (tmp_path / "ours" / "LineNM-STEP-5.pt").write_bytes(content)
    trace = Trace()
    train(line(2), keep(tmp_path / "ours"), trace, max_steps=6)
    assert trace.seen[0] == ("on_action_start", 5, 2)
    assert "trainer-STEP-5.pt is skipped" in caplog.text


@pytest.mark.parametrize("epoch_key", ["epoch", "epoch_num"])
@pytest.mark.parametrize(
    ("mark", "step", "epoch", "begins"),
    [
        ("STEP-4", 4, 2, (5, 2)),  # in the middle of epoch 2
        ("STEP-3", 3, 1, (4, 2)),  # the last step of epoch 1
        ("EPOCH-1", 4, 1, (4, 2)),  # at the end of epoch 1
        ("EPOCH-2", 4, 2, (4, 2)),  # at the end of a training of two epochs
    ],
)
def test_20_files_of_nemo_itself_are_read(
    epoch_key: str, mark: str, step: int, epoch: int, begins: tuple[int, int], tmp_path: Path
) -> None:
    genuine(tmp_path, mark, step, epoch, epoch_key)
    trace, graph = Trace(), line(2)
    seen: list[tuple[float, float]] = []
    look = nemo.on_action_start(
        lambda state: seen.append((graph.weights[0].item(), state["optimizers"][0].param_groups[0]["lr"]))
    )
    train(graph, keep(tmp_path), look, trace, num_epochs=4)
    assert seen == [(3.0, 0.05)]
    assert trace.seen[0] == ("on_action_start", *begins)
    assert trace.seen[-1][0::2] == ("on_action_end", 4)


def test_load_from_folder_has_precedence_over_newer_files(tmp_path: Path) -> None:
    genuine(tmp_path / "old", "STEP-4", 4, 2)
    train(line(2), keep(tmp_path / "new", step_freq=2), max_steps=9)
    trace = Trace()
    train(line(2), keep(tmp_path / "new", step_freq=2, load_from_folder=str(tmp_path / "old")), trace, max_steps=7)
    assert trace.seen[0] == ("on_action_start", 5, 2)


def test_the_name_of_a_module_may_be_a_prefix_of_another(tmp_path: Path) -> None:
    train(line(2), keep(tmp_path, step_freq=2), max_steps=3)
    (tmp_path / "LineNMBig-STEP-9.pt").write_bytes(b"another module's")  # NeMo looks for "LineNM*"
    trace = Trace()
    train(line(2), keep(tmp_path, step_freq=2), trace, max_steps=5)
    assert trace.seen[0] == ("on_action_start", 3, 1)


def two(steps: int, folder: Path) -> list[Tensor]:
    """Train two modules of one class; return their weights."""
    graph, second = line(2), line(2).net
    again = second(x=graph.prediction)
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=again, b=graph.y)
    NeuralModuleFactory().train([loss], "sgd", {**SGD, "max_steps": steps}, [keep(folder, step_freq=1)])
    return [*graph.weights, *(weight.detach() for weight in second.parameters())]


def test_two_modules_of_one_class_have_separate_files(tmp_path: Path) -> None:
    first = two(3, tmp_path)
    assert {name.partition("-")[0] for name in names_in(tmp_path)} == {"LineNM_0", "LineNM_1", "trainer"}
    assert first == two(3, tmp_path)  # found again, also in another process


class Frozen(NetNM):
    """Changes the sign, with a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.sign = nn.Parameter(-torch.ones(1))
        self.freeze()

    def forward(self, x: Tensor) -> Tensor:
        return self.sign * x


def test_a_module_that_is_not_trained_needs_no_file_and_has_one_here(tmp_path: Path) -> None:
    genuine(tmp_path, "STEP-3", 3, 1)
    graph, trace = line(2), Trace()
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=Frozen()(x=graph.prediction), b=graph.y)
    NeuralModuleFactory().train([loss], "sgd", {**SGD, "max_steps": 5}, [keep(tmp_path, step_freq=1), trace])
    assert trace.seen[0][1] == 4
    assert {name.partition("-")[0] for name in names_in(tmp_path)} == {"Frozen", "LineNM", "trainer"}


def test_with_other_data_or_another_optimizer_the_weights_are_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = line(2)
    train(before, keep(tmp_path, step_freq=2), max_steps=4)
    graph, trace = line(3), Trace()
    seen: list[list[Tensor]] = []
    look = nemo.on_action_start(lambda state: seen.append(graph.weights))
    train(graph, keep(tmp_path), look, trace, optimizer="adam", max_steps=6)
    assert seen == [before.weights]
    assert trace.seen[0] == ("on_action_start", 4, 2)
    assert "The checkpoint is from a different training" in caplog.text
    assert trace.counts[3] == 2


def test_weights_that_do_not_fit_are_an_error_and_none_is_changed(tmp_path: Path) -> None:
    genuine(tmp_path, "STEP-3", 3, 1)
    torch.save({"layer.weight": torch.ones(2, 1), "layer.bias": torch.ones(1)}, tmp_path / "LineNM-STEP-3.pt")
    graph = line(2)
    before = graph.weights
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        train(graph, keep(tmp_path), max_steps=6)
    assert graph.weights == before


def test_a_state_can_be_saved_and_restored(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"

    @nemo.on_step_end
    def write(state: State) -> None:
        if state["step"] == 2:
            state.save_state_to(file)

    @nemo.on_action_start
    def read(state: State) -> None:
        state.restore_state_from(file)

    train(line(2), write, max_steps=5)
    assert sorted(torch.load(file, weights_only=True)) == ["epoch", "optimizer_state", "step"]
    trace = Trace()
    train(line(2), read, trace, max_steps=5)
    assert trace.seen[0] == ("on_action_start", 2, 1)
    assert trace.counts[3] == 3


@pytest.mark.parametrize("arguments", [{"step_freq": 0}, {"epoch_freq": -3}, {"step_freq": 1, "checkpoints_to_keep": -1}])
def test_wrong_arguments_are_errors_in_the_constructor(arguments: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        keep(tmp_path, **arguments)


def test_a_factory_without_a_folder_has_none_for_checkpoints() -> None:
    with pytest.raises(TypeError, match=r"folder must be a path; got None\. nf\.checkpoint_dir is a path if"):
        nemo.CheckpointCallback(NeuralModuleFactory().checkpoint_dir)  # type: ignore[arg-type]  # the mistake under test


def test_saves_and_restores_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    train(line(2), keep(tmp_path, step_freq=2), max_steps=3)
    assert f"Saved checkpoint: {tmp_path}/trainer-STEP-3.pt" in caplog.text
    train(line(2), keep(tmp_path, step_freq=2), max_steps=3)
    assert f"Restored checkpoint: {tmp_path}/trainer-STEP-3.pt" in caplog.text
