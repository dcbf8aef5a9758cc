"""Checkpoints of NeMo 0.11 (cases 17, 18 and the old files of 20 of part F2) and 0.10 (14-18 of F1); and killed processes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.compat.nemo.backends.pytorch.nm import LossNM
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo10.core import CheckpointCallback as OldCheckpoint
from tests.compat.nemo.graphs import (
    Line,
    NetNM,
    OldTrace,
    Trace,
    genuine,
    line,
    logged,
    names_in,
    noisy_net,
    steps_of,
    train,
    train_0_10,
)


def keep(folder: Path, **arguments: Any) -> nemo.CheckpointCallback:
    return nemo.CheckpointCallback(str(folder), **arguments)


def keep_0_10(folder: Path, **arguments: Any) -> OldCheckpoint:
    return OldCheckpoint(str(folder), **arguments)


def begun(*callbacks: Any, **length: int) -> tuple[str, int, int]:
    """Train a line; return its first event."""
    trace = Trace()
    train(line(2), *callbacks, trace, **length)
    return trace.seen[0]


# -- names, and where it goes on -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "arguments", "length", "kind", "numbers"),
    [
        (False, {"step_freq": 2}, {"max_steps": 5}, "STEP", [2, 4, 5]),
        (False, {"epoch_freq": 1}, {"num_epochs": 3}, "EPOCH", [1, 2, 3]),
        (False, {"epoch_freq": 2}, {"num_epochs": 5}, "EPOCH", [2, 4, 5]),
        (False, {"step_freq": 1, "checkpoints_to_keep": 2}, {"max_steps": 5}, "STEP", [4, 5]),
        (True, {"step_freq": 2}, {"max_steps": 5}, "STEP", [2, 4, 5]),
        (True, {"epoch_freq": 1}, {"num_epochs": 3}, "EPOCH", [0, 1, 2, 3]),
        (True, {"epoch_freq": 2}, {"num_epochs": 5}, "EPOCH", [1, 3, 5]),
        (True, {"step_freq": 1, "checkpoints_to_keep": 0}, {"max_steps": 6}, "STEP", [1, 2, 3, 4, 5, 6]),
    ],
    ids=str,
)
def test_files_have_these_numbers_and_contents(
    old: bool, arguments: dict[str, Any], length: dict[str, Any], kind: str, numbers: list[int], tmp_path: Path
) -> None:
    graph = line(2)
    (train_0_10 if old else train)(graph, (keep_0_10 if old else keep)(tmp_path, **arguments), **length)
    assert names_in(tmp_path) == sorted(f"{name}-{kind}-{number}.pt" for name in ("LineNM", "trainer") for number in numbers)
    content = torch.load(tmp_path / f"trainer-{kind}-{numbers[-1]}.pt", weights_only=True)
    epoch = "epoch_num" if old else "epoch"
    assert list(content) == ["step", epoch, "optimizer_state", "cadenza"]
    assert content["optimizer_state"][0]["param_groups"][0]["lr"] == 0.1
    assert content["step" if kind == "STEP" else epoch] == numbers[-1]
    weights = torch.load(tmp_path / f"LineNM-{kind}-{numbers[-1]}.pt", weights_only=True)
    assert list(weights.values()) == graph.weights


def test_17_18_a_training_continues_after_the_stored_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    assert f"Saved checkpoint: {tmp_path}/trainer-STEP-5.pt" in caplog.text
    before = torch.load(tmp_path / "LineNM-STEP-5.pt", weights_only=True)
    trace, graph = Trace(), line(2)
    train(graph, keep(tmp_path, step_freq=2), trace, max_steps=5)  # of a finished one, only the start and the end are called
    assert f"Restored checkpoint: {tmp_path}/trainer-STEP-5.pt" in caplog.text
    assert trace.seen == [("on_action_start", 5, 2), ("on_action_end", 5, 3)]
    assert all(map(torch.equal, before.values(), graph.weights))

    for file in tmp_path.glob("*-STEP-5.pt"):  # as if the training was killed before its end
        file.unlink()
    earlier, trace = Trace(), Trace()
    train(line(2), earlier, keep(tmp_path, step_freq=2), trace, max_steps=7)
    assert earlier.seen[0] == ("on_action_start", 0, 0)  # later callbacks see the restored counters in the same event
    # NeMo repeats step 4: it starts at (4, 2) and does 8 updates for 7 steps.
    assert (trace.seen[0], trace.seen[-1]) == (("on_action_start", 5, 2), ("on_action_end", 7, 4))
    assert [step for event, step, _ in trace.seen if event == "on_step_end"] == [5, 6]


def test_load_from_folder_has_precedence_over_newer_files(tmp_path: Path) -> None:
    genuine(tmp_path / "old", "STEP-4", 4, 2)
    train(line(2), keep(tmp_path / "new", step_freq=2), max_steps=9)
    newer = keep(tmp_path / "new", step_freq=2, load_from_folder=str(tmp_path / "old"))
    assert begun(newer, max_steps=7) == ("on_action_start", 5, 2)


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
    with pytest.raises(TypeError, match=r"folder must be a path; got None\. nf\.checkpoint_dir is a path if"):
        nemo.CheckpointCallback(NeuralModuleFactory().checkpoint_dir)  # type: ignore[arg-type]  # the mistake under test


# -- 0.10 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [False, True], ids=["new instances", "one instance"])
def test_15_the_last_two_are_kept_and_files_of_earlier_trainings_are_not_deleted(same: bool, tmp_path: Path) -> None:
    first, second = (keep_0_10(tmp_path, step_freq=1, checkpoints_to_keep=2) for _ in range(2))
    train_0_10(line(2), first, max_steps=5)
    assert steps_of(tmp_path) == [4, 5]
    train_0_10(line(2), first if same else second, max_steps=9)
    assert steps_of(tmp_path) == [4, 8, 9]  # its first step is STEP-5, too


def test_16_force_load_needs_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        with pytest.raises(ValueError, match="force_load=True needs a checkpoint, but nothing could be restored"):
            train_0_10(line(2), keep_0_10(tmp_path / folder, step_freq=2, force_load=True), max_steps=2)
        trace = OldTrace()
        train_0_10(line(2), keep_0_10(tmp_path / folder, step_freq=9), trace, max_steps=2)
        assert trace.seen[-1] == ("on_action_end", 2, 1)
    assert sum(text.startswith("Nothing was restored") for text in logged(caplog, logging.WARNING)) == 2


def test_16_with_module_files_only_weights_are_restored_and_steps_start_at_0(tmp_path: Path) -> None:
    before = line(2)
    train_0_10(before, keep_0_10(tmp_path, step_freq=2), max_steps=3)
    for file in tmp_path.glob("trainer*"):
        file.unlink()
    graph, seen = line(2), list[Any]()
    look = nemo.on_action_start(lambda state: seen.append((graph.weights == before.weights, state["step"])))
    train_0_10(graph, keep_0_10(tmp_path, step_freq=2, force_load=True), look, max_steps=1)
    assert seen == [(True, 0)]


def test_17_weights_that_do_not_fit_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    genuine(tmp_path, "STEP-3", 3, 1, "epoch_num")
    torch.save({"layer.weight": torch.full((1, 1), 9.0), "layer.bias": torch.ones(5)}, tmp_path / "LineNM-STEP-3.pt")
    trace, graph = OldTrace(), line(2)
    train_0_10(graph, keep_0_10(tmp_path, step_freq=9), trace, max_steps=2)
    assert trace.seen[0] == ("on_action_start", 0, 0)
    assert "Weights were not restored" in caplog.text
    fresh = line(2)
    train_0_10(fresh, max_steps=2)
    assert graph.weights == fresh.weights


def test_18_step_freq_has_precedence_and_without_any_nothing_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_0_10(line(2), keep_0_10(tmp_path, step_freq=2, epoch_freq=1), max_steps=3)
    assert (steps_of(tmp_path), steps_of(tmp_path, "EPOCH")) == ([2, 3], [])
    assert "Both step_freq and epoch_freq were given" in caplog.text
    (tmp_path / "empty").mkdir()
    train_0_10(line(2), keep_0_10(tmp_path / "empty"), max_steps=3)
    assert names_in(tmp_path / "empty") == []
    assert sum(text.startswith("No checkpoints will be saved") for text in logged(caplog, logging.WARNING)) == 1


def test_each_version_reads_the_files_of_the_other(tmp_path: Path) -> None:
    train_0_10(line(2), keep_0_10(tmp_path / "a", step_freq=2), max_steps=3)
    train(line(2), keep(tmp_path / "b", step_freq=2), max_steps=3)
    assert begun(keep(tmp_path / "a"), max_steps=5) == ("on_action_start", 3, 1)
    trace = OldTrace()
    train_0_10(line(2), keep_0_10(tmp_path / "b"), trace, max_steps=5)
    assert trace.seen[0] == ("on_action_start", 3, 1)


# -- to the same bits ---------------------------------------------------------------------------------


def noisy() -> Line:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    return line(loader=DataLoader(TensorDataset(x, x.sin()), batch_size=4, shuffle=True), net=noisy_net())


class Killed(BaseException):
    """End like SIGKILL: without any clean-up."""


@pytest.mark.parametrize("at", [1, 3, 6, 9, 12])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_killed_and_resumed_training_is_bit_identical(at: int, accumulate: int, tmp_path: Path) -> None:
    def go(graph: Line, *others: Any) -> None:
        factory = NeuralModuleFactory(random_seed=1)
        train(graph, *others, factory=factory, optimizer="adam", max_steps=14, batches_per_step=accumulate)

    @nemo.on_step_start
    def kill(state: State) -> None:
        if state["step"] == at + 1:
            raise Killed

    whole, cut, continued = noisy(), noisy(), noisy()
    go(whole)
    with pytest.raises(Killed):
        go(cut, kill, keep(tmp_path, step_freq=max(1, at)))
    assert steps_of(tmp_path) == [at]
    go(continued, keep(tmp_path, step_freq=100))
    expected, found = whole.net.state_dict(), continued.net.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def die_at(count: int, act: Callable[[], object]) -> bool:
    """Run a function in a process that ends before it flushes or renames a file for the n-th time."""
    child = os.fork()
    if not child:
        left = [count]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(*arguments)

            return call

        try:
            os.fsync = counted(os.fsync)
            Path.replace = counted(Path.replace)  # type: ignore[method-assign]  # in this process only
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize(("before", "steps"), [(0, 3), (5, 6)])
def test_a_kill_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(before: int, steps: int, tmp_path: Path) -> None:
    if before:  # five steps end as STEP-5; the next training writes another STEP-5 after its first step
        train(line(2), keep(tmp_path / "before", step_freq=1, checkpoints_to_keep=1), max_steps=before)
    whole, count = {0: line(2).weights}, 0
    for length in range(1, steps + 1):
        graph = line(2)
        train(graph, max_steps=length)
        whole[length] = graph.weights
    while True:
        count += 1
        folder = tmp_path / str(count)
        if before:
            shutil.copytree(tmp_path / "before", folder)
        killed = die_at(count, lambda: train(line(2), keep(folder, step_freq=1, checkpoints_to_keep=1), max_steps=steps))  # noqa: B023
        if not killed:
            break
        found: list[tuple[int, list[Tensor]]] = []
        graph = line(2)
        look = nemo.on_action_start(lambda state: found.append((state["step"], graph.weights)))  # noqa: B023
        train(graph, keep(folder), look, max_steps=steps)
        [(step, weights)] = found
        assert weights == whole[step], (count, step)
        assert step >= before
        assert graph.weights == whole[steps]
    assert count > 10


def test_a_failing_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    train(line(2), keep(tmp_path, step_freq=1), max_steps=2)
    before = names_in(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        train(line(2), keep(tmp_path, step_freq=1), max_steps=5)
    assert names_in(tmp_path) == before


# -- files that the run did not write ------------------------------------------------------------------


def test_files_of_a_killed_save_or_another_module_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.joinpath(".LineNM-STEP-1.pt.new").write_bytes(b"PK half")  # of a kill
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "LineNMBig-STEP-9.pt").write_bytes(b"another module's")  # NeMo looks for "LineNM*"
    assert begun(keep(tmp_path), max_steps=7) == ("on_action_start", 5, 2)
    assert "is skipped" not in caplog.text
    (tmp_path / "LineNM-STEP-5.pt").write_bytes((tmp_path / "LineNM-STEP-2.pt").read_bytes())
    assert begun(keep(tmp_path, step_freq=2), max_steps=7) == ("on_action_start", 5, 2)  # from STEP-4
    assert "trainer-STEP-5.pt is skipped: the files of LineNM are missing or incomplete" in caplog.text


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
    assert begun(keep(tmp_path / "ours"), max_steps=6) == ("on_action_start", 5, 2)
    assert "trainer-STEP-5.pt is skipped" in caplog.text


@pytest.mark.parametrize("old", [False, True], ids=["0.11", "0.10"])
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
    old: bool, epoch_key: str, mark: str, step: int, epoch: int, begins: tuple[int, int], tmp_path: Path
) -> None:
    genuine(tmp_path, mark, step, epoch, epoch_key)
    graph, seen = line(2), list[tuple[float, float]]()
    look = nemo.on_action_start(
        lambda state: seen.append((graph.weights[0].item(), state["optimizers"][0].param_groups[0]["lr"]))
    )
    trace: Any = OldTrace() if old else Trace()
    (train_0_10 if old else train)(graph, (keep_0_10 if old else keep)(tmp_path), look, trace, num_epochs=4)
    assert seen == [(3.0, 0.05)]
    assert trace.seen[0] == ("on_action_start", *begins)
    assert trace.seen[-1][0::2] == ("on_action_end", 4)


def two(steps: int, folder: Path) -> list[Tensor]:
    """Train two modules of one class; return their weights."""
    graph, second = line(2), line(2).net
    again = second(x=graph.prediction)
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=again, b=graph.y)
    train([loss], keep(folder, step_freq=1), max_steps=steps)
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
    train([loss], keep(tmp_path, step_freq=1), trace, max_steps=5)
    assert trace.seen[0][1] == 4
    assert {name.partition("-")[0] for name in names_in(tmp_path)} == {"Frozen", "LineNM", "trainer"}


def test_with_another_optimizer_and_data_the_weights_are_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
