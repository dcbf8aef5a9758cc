"""What torchrun starts again continues by itself. The agent is torchrun's own, in a forked process: its start-up is saved."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.drivers import DdpDriver
from cadenza.errors import DistributedError
from cadenza.hooks.moments import Moment
from cadenza.testing import launch
from tests.distributed.parts import loader, network, trainer, weights_of
from tests.ports import free_port
from tests.waiting import until

Failure = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def torchrun(
    function: Callable[[], Any], logs: Path, *, restarts: int, nodes: int = 1, port: int = 0, fewest: int | None = None
) -> Any:
    """Call `function` as ``torchrun --nnodes --nproc-per-node --max-restarts`` would: two ranks in all.

    With `fewest` machines or more it starts again if the others are lost, as ``--nnodes=fewest:nodes``.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dynamic_rendezvous.get_method_name = caller  # its own searches all modules for each frame of pytest
    config = LaunchConfig(
        min_nodes=nodes if fewest is None else fewest,
        max_nodes=nodes,
        nproc_per_node=2 // nodes,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={} if fewest is None else {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3},
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )
    return elastic_launch(config, function)()


def caller(depth: int = 2) -> str:
    """Return the name of the function `depth` calls above, for the events that torchrun records."""
    return sys._getframe(depth).f_code.co_name


def training(folder: Path, at: Moment | None, step: int, victim: int, failure: Failure = kill) -> Callable[[], Any]:
    """Return what trains for 8 steps, a checkpoint after each; once, at a moment after a step, `failure` happens to a rank."""

    def train() -> tuple[Tensor, list[str], list[str | None]]:
        def once(run: Run, *rest: Any) -> None:
            mark = folder / "failed"
            if run.progress.step == step and run.driver.rank == victim and not mark.exists():
                mark.touch()
                failure()

        one = trainer(
            model=network(dropout=0.3),
            max_epochs=None,
            max_steps=8,
            directory=folder / "run",
            driver=DdpDriver("cpu", timeout_s=100),
            callbacks=[Checkpoint("1 step"), *([] if at is None else [on(at)(once)])],
        )
        run = one.fit(resume="auto")
        place = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        return weights_of(one), [decision.why for decision in run.decisions if decision.what == "resumed"], place

    return train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    folder = tmp_path_factory.mktemp("undisturbed")
    weights: Tensor = launch(training(folder, None, 0, 0), 2)[0][0]
    return weights


@pytest.mark.parametrize(
    ("at", "step", "victim", "failure"),
    [
        pytest.param(Callback.on_before_backward, 4, 0, kill, id="the main process killed in a step"),
        pytest.param(Callback.on_before_backward, 4, 1, kill, id="another killed in a step"),
        pytest.param(Callback.on_save, 4, 0, kill, id="killed in a save"),
        pytest.param(Callback.on_batch_start, 0, 0, kill, id="killed before the first checkpoint"),
        pytest.param(Callback.on_batch_start, 4, 1, fail, id="an error"),
    ],
)
def test_what_is_started_again_ends_with_the_same_bits(
    at: Moment, step: int, victim: int, failure: Failure, undisturbed: Tensor, tmp_path: Path
) -> None:
    train = training(tmp_path, at, step, victim, failure)
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=1), 1)
    assert (tmp_path / "failed").exists()
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed)
        assert len(resumed) == (step > 0)


def test_two_machines_write_once_and_start_again_together_though_they_count_apart(undisturbed: Tensor, tmp_path: Path) -> None:
    train, port = training(tmp_path, Callback.on_before_backward, 4, 1), free_port()
    machines = launch(lambda: torchrun(train, tmp_path / "logs", restarts=3, nodes=2, port=port), 2)
    ranks = [result for machine in machines for result in machine.values()]
    assert sorted(place for *_, place in ranks) == [["0", "0", "2"], ["1", "0", "2"]]  # both are the first on their machine
    for weights, resumed, _ in ranks:
        assert torch.equal(weights, undisturbed)
        assert len(resumed) == 1
    steps = [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps == ["step-00000007", "step-00000008"]


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


def test_who_came_before_and_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    def join() -> list[str]:
        if os.environ["RANK"] == "2":  # a rank 1 of an earlier start
            os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
            with pytest.raises(DistributedError, match="rank 1 of 2 could not reach the other ranks"):
                DdpDriver("cpu", timeout_s=1)
            (tmp_path / "gone").touch()
            return []
        os.environ["WORLD_SIZE"] = "2"
        while not (tmp_path / "gone").exists():
            time.sleep(0.01)
        return DdpDriver("cpu", timeout_s=100).gather(os.environ["RANK"])

    assert launch(join, 3) == [["0", "1"], ["0", "1"], []]


def test_who_does_not_come_is_an_error_in_bounded_time() -> None:
    def join() -> None:
        if os.environ["RANK"] == "0":
            with pytest.raises(DistributedError, match=r"rank 0 of 2 .* 1 s: 0 of 1 other processes arrived\. Check that"):
                DdpDriver("cpu", timeout_s=1)

    launch(join, 2)


def test_sigterm_to_torchrun_ends_all_with_a_checkpoint_and_the_next_start_goes_on(undisturbed: Tensor, tmp_path: Path) -> None:
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
        assert torch.equal(weights, undisturbed)
        assert len(resumed) == 1


def test_an_error_that_comes_again_ends_all_when_there_are_no_more_restarts(tmp_path: Path) -> None:
    def failing() -> None:
        @on(Callback.on_batch_start)
        def again(run: Run, batch: Any) -> None:
            if run.driver.rank == 1:
                raise ZeroDivisionError("each time")

        with (tmp_path / os.environ["RANK"]).open("a") as starts:
            starts.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} ")
        trainer(directory=tmp_path / "run", callbacks=[again]).fit(resume="auto")

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: torchrun(failing, tmp_path / "logs", restarts=1), 1)
    assert "ZeroDivisionError: each time" in str(caught.value.exceptions[0])  # what torchrun shows last
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [["0", "1"]] * 2
