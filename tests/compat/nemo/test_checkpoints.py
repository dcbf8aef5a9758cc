"""NeMo 0.11, checkpoints: equivalence cases 17, 18 and the old files of 20 of part F2; and killed processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import CheckpointCallback
from tests.compat.nemo.graphs import SGD, Line, NetNM, line, names_in, steps_of
from tests.compat.nemo.test_events import Trace


def train(graph: Line, *callbacks: Any, optimizer: str = "sgd", accumulate: int = 1, **params: Any) -> Any:
    settings = SGD if optimizer == "sgd" else {"lr": 0.1}
    return NeuralModuleFactory(random_seed=1).train(
        [graph.loss], optimizer, {**settings, **params}, list(callbacks), batches_per_step=accumulate
    )


def keep(folder: Path, **arguments: Any) -> CheckpointCallback:
    return CheckpointCallback(str(folder), **arguments)


# -- 17: names, and where it goes on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "params", "kind", "numbers"),
    [
        ({"step_freq": 2}, {"max_steps": 5}, "STEP", [2, 4, 5]),
        ({"epoch_freq": 1}, {"num_epochs": 3}, "EPOCH", [1, 2, 3]),
        ({"epoch_freq": 2}, {"num_epochs": 5}, "EPOCH", [2, 4, 5]),
        ({"step_freq": 1, "checkpoints_to_keep": 2}, {"max_steps": 5}, "STEP", [4, 5]),
    ],
)
def test_17_files_have_these_numbers(
    arguments: dict[str, Any], params: dict[str, Any], kind: str, numbers: list[int], tmp_path: Path
) -> None:
    train(line(2), keep(tmp_path, **arguments), **params)
    assert names_in(tmp_path) == sorted(f"{name}-{kind}-{number}.pt" for name in ("LineNM", "trainer") for number in numbers)
    content = torch.load(tmp_path / f"trainer-{kind}-{numbers[-1]}.pt", weights_only=True)
    assert list(content) == ["step", "epoch", "optimizer_state", "cadenza"]
    assert content["optimizer_state"][0]["param_groups"][0]["lr"] == 0.1


def drop_last(folder: Path) -> None:
    """Leave the files of a training that was killed before its end."""
    for file in folder.glob("*-STEP-5.pt"):
        file.unlink()


def test_17_a_training_continues_after_the_stored_step(tmp_path: Path) -> None:
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    drop_last(tmp_path)
    trace = Trace()
    train(line(2), keep(tmp_path, step_freq=2), trace, max_steps=7)
    # NeMo repeats step 4: it starts at (4, 2) and does 8 updates for 7 steps.
    assert (trace.seen[0], trace.seen[-1]) == (("on_action_start", 5, 2), ("on_action_end", 7, 4))
    assert [step for event, step, _ in trace.seen if event == "on_step_end"] == [5, 6]


def test_17_a_finished_training_only_calls_start_and_end(tmp_path: Path) -> None:
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    before = torch.load(tmp_path / "LineNM-STEP-5.pt", weights_only=True)
    trace, graph = Trace(), line(2)
    train(graph, keep(tmp_path, step_freq=2), trace, max_steps=5)
    assert trace.seen == [("on_action_start", 5, 2), ("on_action_end", 5, 3)]
    assert all(map(torch.equal, before.values(), graph.weights))


def test_18_later_callbacks_see_the_restored_counters_in_the_same_event(tmp_path: Path) -> None:
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    seen: list[tuple[int, int]] = []
    look = [nemo.on_action_start(lambda state: seen.append((state["step"], state["epoch"]))) for _ in range(2)]
    train(line(2), look[0], keep(tmp_path, step_freq=2), look[1], max_steps=7)
    assert seen == [(0, 0), (5, 2)]


# -- to the same bits ---------------------------------------------------------------------------------


class Noisy(NetNM):
    """A network that draws random numbers and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


def noisy() -> Line:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    return line(loader=DataLoader(TensorDataset(x, x.sin()), batch_size=4, shuffle=True), net=Noisy())


class Killed(BaseException):
    """End like SIGKILL: without any clean-up."""


@pytest.mark.parametrize("at", [1, 3, 6, 9, 12])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_killed_and_resumed_training_is_bit_identical(at: int, accumulate: int, tmp_path: Path) -> None:
    def go(graph: Line, *others: Any) -> None:
        train(graph, *others, optimizer="adam", max_steps=14, accumulate=accumulate)

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


@pytest.mark.parametrize("before", [0, 5])
def test_after_a_kill_at_any_point_of_a_save_the_old_or_the_new_checkpoint_is_found(before: int, tmp_path: Path) -> None:
    # Five steps end as STEP-5. The next training writes another STEP-5 after its first step.
    whole, count = {0: line(2).weights}, 0
    for steps in range(1, 7):
        graph = line(2)
        train(graph, max_steps=steps)
        whole[steps] = graph.weights
    while True:
        count += 1
        folder = tmp_path / str(count)
        if before:
            train(line(2), keep(folder, step_freq=1, checkpoints_to_keep=1), max_steps=before)
        killed = die_at(count, lambda: train(line(2), keep(folder, step_freq=1, checkpoints_to_keep=1), max_steps=6))  # noqa: B023
        if not killed:
            break
        found: list[tuple[int, list[Tensor]]] = []
        graph = line(2)
        look = nemo.on_action_start(lambda state: found.append((state["step"], graph.weights)))  # noqa: B023
        train(graph, keep(folder), look, max_steps=6)
        [(step, weights)] = found
        assert weights == whole[step], (count, step)
        assert step >= before
        assert graph.weights == whole[6]
    assert count > 10


def test_the_next_save_removes_the_temporary_files_of_a_kill(tmp_path: Path) -> None:
    tmp_path.joinpath(".LineNM-STEP-1.pt.new").write_bytes(b"PK half")
    train(line(2), keep(tmp_path, step_freq=2), max_steps=3)
    assert not list(tmp_path.glob(".*"))


def test_a_module_file_of_another_save_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(line(2), keep(tmp_path, step_freq=2), max_steps=5)
    (tmp_path / "LineNM-STEP-5.pt").write_bytes((tmp_path / "LineNM-STEP-2.pt").read_bytes())
    trace = Trace()
    train(line(2), keep(tmp_path, step_freq=2), trace, max_steps=7)
    assert trace.seen[0] == ("on_action_start", 5, 2)  # from STEP-4
    assert "trainer-STEP-5.pt is skipped: the files of LineNM are missing or incomplete" in caplog.text


def test_a_failing_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    train(line(2), keep(tmp_path, step_freq=1), max_steps=2)
    before = names_in(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        train(line(2), keep(tmp_path, step_freq=1), max_steps=5)
    assert names_in(tmp_path) == before
