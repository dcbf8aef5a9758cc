"""All ranks decide alike: stops, skips, times, and how an error ends them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import LogTraining
from cadenza.drivers import DdpDriver, driver_of
from cadenza.drivers.joining import rendezvous_of
from cadenza.errors import DataError, DistributedError
from cadenza.hooks.listener import Listener
from cadenza.hooks.schedule import Schedule
from cadenza.hooks.subscription import periodic
from cadenza.testing import launch
from tests.distributed.parts import Batch, fsdp, loader, network, own_rank, rank, squared_error, trainer, weights_of
from tests.distributed.standing import on_ranks


def test_a_debugger_may_look_at_everything_of_a_run_on_one_rank() -> None:
    """Reading an attribute never communicates: the other rank would wait, or the collectives would come apart."""

    def looking() -> tuple[bool, int, list[float]]:
        given = network()
        own: list[bool] = []

        @on(Callback.on_step_end)
        def look(run: Run) -> None:
            if rank() == 1:
                own.append(dict(inspect.getmembers(run))["model"] is given)
                assert repr(run)
                assert run._repr_html_()

        one = trainer(model=given, callbacks=[look])
        run = one.fit()
        return all(own) and run.model is given, run.progress.step, weights_of(one).tolist()

    first, second = on_ranks(looking)
    assert first == second
    assert first[0]  # also where the driver has wrapped it


def test_an_error_on_one_rank_ends_all_and_is_the_first_that_is_shown() -> None:
    def failing() -> None:
        @on(Callback.on_batch_start)
        def fail(run: Run, batch: Batch) -> None:
            if run.progress.step == 2 and rank() == 1:
                raise ZeroDivisionError("on purpose")

        trainer(callbacks=[fail]).fit()

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(failing)
    first, second = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, DistributedError)
    assert "rank 0 ends because another process ended. rank 1: ZeroDivisionError: on purpose" in str(second)


def test_a_directory_that_cannot_be_used_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def writing() -> str:
        with pytest.raises(Exception, match="cannot be written") as caught:
            trainer(directory=tmp_path / "file").fit()
        return type(caught.value).__name__

    assert on_ranks(writing) == ["DirectoryError", "DistributedError"]


def test_what_is_due_after_a_time_is_due_at_the_same_step_on_all_ranks() -> None:
    def timed() -> list[int]:
        steps: list[int] = []

        class Slow(Callback):
            """The clock of rank 1 goes wrong: without agreement it would be due there alone."""

            def on_step_end(self, run: Run) -> None:
                if rank() == 1 and run.progress.step == 4:
                    run.progress._began -= 100

        class Note(Callback):
            def listeners(self) -> list[Listener]:
                return [periodic(Schedule.parse("50 s"), lambda run: steps.append(run.progress.step))]

        trainer(max_epochs=4, callbacks=[Slow(), Note()]).fit()
        return steps

    first, second = on_ranks(timed)
    assert first == second
    assert len(first) == 1


def test_all_that_differs_is_told_at_once_on_all_ranks() -> None:
    def told(**arguments: Any) -> str:
        with pytest.raises(DistributedError) as caught:
            trainer(**arguments).fit()
        return str(caught.value)

    def differing() -> list[str]:
        model, rate = network(), 0.1 * (1 + own_rank())
        other: dict[str, Any] = {}
        if rank() == 1:
            model[0].requires_grad_(False)
            model[3].double()
            other = {"accumulate": 2, "max_epochs": 3, "callbacks": [LogTraining()]}
        return [
            told(model=model, data=loader(20 if rank() == 1 else 24), **other),
            told(model=nn.Sequential(nn.Linear(3, 1)) if rank() == 1 else None, seed=rank()),
            told(optimizer=lambda parameters: torch.optim.SGD(parameters, rate)),
            told(optimizer=(torch.optim.SGD, torch.optim.Adam)[own_rank()]),
        ]

    expected = [
        [
            "callbacks is ['LogTraining'] on rank 1 and [] on rank 0",
            "max_epochs is 3 on rank 1 and 2 on rank 0",
            "accumulate is 2 on rank 1 and 1 on rank 0",
            "the number of batches is 5 on rank 1 and 6 on rank 0",
            "the number of parameters that require a gradient is 2 on rank 1 and 4 on rank 0",
            "whether 0.bias requires a gradient is False on rank 1 and True on rank 0",
            "the type of 3.weight is 'torch.float64' on rank 1 and 'torch.float32' on rank 0",
        ],
        ["seed is 1 on rank 1 and 0 on rank 0", "the shape of 0.weight is (1, 3) on rank 1 and (8, 3) on rank 0"],
        ["the list of optimizers is [{'name': 'SGD', 'lr': 0.2,"],
        ["'name': 'Adam'"],
    ]
    first, second = on_ranks(differing)
    assert first == second
    for text, differences in zip(first, expected, strict=True):
        for difference in differences:
            assert difference in text


def test_a_loader_shorter_than_the_number_of_ranks_is_an_error() -> None:
    def short() -> str:
        with pytest.raises(DataError, match="the training loader has 1 batch for 2 ranks") as caught:
            trainer(loader(4)).fit()
        with pytest.raises(DataError, match="the loader of 'eval' has 1 batch for 2 ranks"):
            trainer().evaluate(loader(4))
        return str(caught.value)

    on_ranks(short)


def test_a_rank_that_cannot_reach_the_others_says_so_in_bounded_time() -> None:
    def alone() -> None:
        said = r"rank 0 of 2 could not reach the other ranks at .* within 1 s: 0 of 1 other processes arrived\. Check that"
        if rank() == 1:  # for which there is no master, and for which rank 0 waits
            os.environ |= {"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
            said = r"rank 1 of 2 could not reach the other ranks at 127.0.0.1:1 within 1 s: "
        with pytest.raises(DistributedError, match=said):
            DdpDriver("cpu", timeout_s=1)

    launch(alone)


def test_a_driver_for_one_process_is_refused_in_each_of_several() -> None:
    def alone() -> str:
        with pytest.raises(ValueError, match="Use driver='auto', 'ddp' or 'fsdp', or start it without") as caught:
            trainer(driver="single")
        return str(caught.value)

    for told in on_ranks(alone):
        assert told.startswith("driver='single' is for one process, and this one was started as one of WORLD_SIZE=2")


def test_ddp_without_a_launcher_is_refused() -> None:
    with pytest.raises(DistributedError, match=r"was started alone: .* torchrun --nproc-per-node=2"):
        driver_of("ddp")


def test_slurms_variables_say_where_the_processes_meet() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "5"}
    for nodes, host in {"a1": "a1", "a[01-03],b": "a01", "a[3,5]-x": "a3-x", "n1,n2": "n1"}.items():
        found = rendezvous_of({**step, "SLURM_STEP_NODELIST": nodes})
        assert found is not None
        assert (found.rank, found.ranks, found.host, found.port) == (3, 4, host, 20005)
    del step["SLURM_STEP_ID"]  # the shell of a batch script
    assert rendezvous_of(step) is None


@pytest.mark.parametrize("judge", ["evaluate", "predict"])
def test_an_error_of_one_rank_in_an_evaluation_is_told_to_the_others(judge: str) -> None:
    def failing() -> None:
        def compute(model: nn.Module, batch: Batch) -> Tensor:
            if rank() == 1:
                raise ZeroDivisionError("on purpose")
            return squared_error(model, batch)

        one = trainer(driver=fsdp())
        getattr(one, judge)(loader(24), compute=compute)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(failing)
    first, second = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    where = "predict" if judge == "predict" else "evaluation 'eval'"
    assert first.__notes__[0].startswith(f"context: compute, in batch 1 of {where}, on rank 1")
    assert isinstance(second, DistributedError)
    assert "rank 1: ZeroDivisionError: on purpose" in str(second)
