"""What torchrun starts again after a kill continues by itself, and its signals reach all ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.drivers import posts
from cadenza.hooks.moments import Moment
from cadenza.testing import launch
from tests.distributed.parts import loader, trainer
from tests.distributed.test_restarts import torchrun, training, undisturbed
from tests.ports import free_port
from tests.waiting import until


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def frequent_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "EVERY_S", 0.1)


@pytest.mark.parametrize(
    ("at", "step", "victim"),
    [
        pytest.param(Callback.on_before_backward, 4, 1, id="another killed in a step"),
        pytest.param(Callback.on_before_backward, 4, 0, id="the main process killed in a step", marks=pytest.mark.long),
        pytest.param(Callback.on_save, 4, 0, id="killed in a save", marks=pytest.mark.long),
        pytest.param(Callback.on_batch_start, 0, 0, id="killed before the first checkpoint", marks=pytest.mark.long),
    ],
)
def test_what_is_started_again_ends_with_the_same_bits(at: Moment, step: int, victim: int, tmp_path: Path) -> None:
    train = training(tmp_path, at, step, victim, kill)
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=1), 1)
    assert (tmp_path / "failed").exists()
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == (step > 0)


def test_sigterm_to_torchrun_ends_all_with_a_checkpoint_and_the_next_start_goes_on(tmp_path: Path) -> None:
    def terminate() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)  # until torchrun has handed it on

    train = training(tmp_path, Callback.on_step_end, 4, 1, terminate)
    with pytest.raises(BaseExceptionGroup, match="1 of 1 ranks failed"):
        launch(lambda: torchrun(train, tmp_path / "logs", restarts=0), 1)
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]
    assert outcome == {"kind": "preempted", "reason": "signal SIGTERM"}
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=0), 1)
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == 1


@pytest.mark.long
def test_two_machines_write_once_and_start_again_together_though_they_count_apart(tmp_path: Path) -> None:
    train, port = training(tmp_path, Callback.on_before_backward, 4, 1, kill), free_port()
    machines = launch(lambda: torchrun(train, tmp_path / "logs", restarts=3, nodes=2, port=port), 2)
    ranks = [result for machine in machines for result in machine.values()]
    assert sorted(place for *_, place in ranks) == [["0", "0", "2"], ["1", "0", "2"]]  # both are the first on their machine
    for weights, resumed, _ in ranks:
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == 1
    steps = [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps == ["step-00000007", "step-00000008"]


@pytest.mark.long
def test_a_machine_that_is_lost_for_good_is_left_out_and_the_rest_of_the_epoch_is_trained_without_it(tmp_path: Path) -> None:
    lost = tmp_path / "lost"

    def train() -> list[int]:
        if os.environ["WORLD_SIZE"] == "1":  # too early if the other machine is slow: as it comes, both start again
            until(lost.exists)

        @on(Callback.on_step_end, at=4)
        def lose(run: Run) -> None:
            if os.environ["MACHINE"] == "1":
                until((tmp_path / "run" / "checkpoints" / "step-00000003").exists)  # written in the background
                lost.touch()
                os.kill(os.getppid(), signal.SIGKILL)  # torchrun of this machine
                kill()

        run = trainer(
            loader(48),
            max_epochs=1,
            directory=tmp_path / "run",
            driver="auto",
            device="cpu",
            callbacks=[Checkpoint("1 step"), lose],
        ).fit(resume="auto")
        return [run.driver.world_size, run.progress.origin.samples, run.progress.samples]

    def machine() -> Any:
        number = os.environ["MACHINE"] = os.environ["RANK"]
        if number == "0":  # it serves the rendezvous
            return torchrun(train, tmp_path / "logs", restarts=3, nodes=2, fewest=1, port=port)
        until(partial(is_open, port))
        options = {"restarts": 3, "nodes": 2, "fewest": 1, "port": port}
        agent = multiprocessing.get_context("fork").Process(target=torchrun, args=(train, tmp_path / "logs"), kwargs=options)
        agent.start()
        agent.join(200)
        return agent.exitcode

    port = free_port()
    assert launch(machine) == [{0: [1, 24, 48]}, -signal.SIGKILL]


def is_open(port: int) -> bool:
    """Return whether a process of this machine accepts connections at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
