"""What torchrun starts again continues by itself. The agent is torchrun's own, in a forked process: its start-up is saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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
from tests.distributed.drivers import ddp
from tests.distributed.parts import network, trainer, weights_of
from tests.waiting import until

Failure = Callable[[], None]


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


def training(folder: Path, at: Moment | None, step: int, victim: int, failure: Failure) -> Callable[[], Any]:
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
            driver=ddp(),
            callbacks=[Checkpoint("1 step"), *([] if at is None else [on(at)(once)])],
        )
        run = one.fit(resume="auto")
        place = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        return weights_of(one), [decision.why for decision in run.decisions if decision.what == "resumed"], place

    return train


@cache
def undisturbed() -> Tensor:
    """Return the weights of a run in which nothing fails."""
    with TemporaryDirectory() as folder:
        weights: Tensor = launch(training(Path(folder), None, 0, 0, fail))[0][0]
    return weights


def test_after_an_error_it_is_started_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """tests/alone/test_lost_ranks.py does this with processes that are killed."""
    train = training(tmp_path, Callback.on_batch_start, 4, 1, fail)
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=1), 1)
    assert (tmp_path / "failed").exists()
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == 1


def test_who_came_before_and_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    def join() -> list[str]:
        if os.environ["RANK"] == "2":  # a rank 1 of an earlier start
            os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
            with pytest.raises(DistributedError, match="rank 1 of 2 could not reach the other ranks"):
                DdpDriver("cpu", timeout_s=1)
            (tmp_path / "gone").touch()
            return []
        os.environ["WORLD_SIZE"] = "2"
        until((tmp_path / "gone").exists)
        return ddp().gather(os.environ["RANK"])

    assert launch(join, 3) == [["0", "1"], ["0", "1"], []]


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
