"""All ranks decide alike: stops, skips, times, and how an error ends them."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.drivers import DdpDriver, FsdpDriver, driver_of
from cadenza.drivers.joining import rendezvous_of
from cadenza.errors import DataError, DistributedError
from cadenza.hooks.listener import Listener
from cadenza.hooks.schedule import Schedule
from cadenza.hooks.subscription import periodic
from cadenza.sinks import JsonLines
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, network, rank, squared_error, trainer, weights_of
from tests.waiting import until


def test_a_stop_asked_for_on_one_rank_is_taken_on_all_at_the_same_step() -> None:
    def stopping() -> tuple[int, str, list[str], int]:
        heard: list[str] = []

        class Stop(Callback):
            def on_step_end(self, run: Run) -> None:
                if run.progress.step == 3 and run.driver.rank == 1:  # also the last step of the epoch
                    run.stop("enough")

            def on_stop(self, run: Run, reason: str) -> None:
                heard.append(reason)

        run = trainer(max_epochs=5, callbacks=[Stop()]).fit()
        assert run.outcome is not None
        on_both = trainer(max_epochs=5, callbacks=[on(Callback.on_step_end)(lambda run: run.stop("enough"))]).fit()
        noted = sum(decision.what == "stopped" for decision in on_both.decisions)
        return run.progress.step, run.why("stopped"), [run.outcome.kind, *heard], noted

    first, second = launch(stopping)
    assert first[0] == second[0] == 3
    assert first[2] == second[2] == ["stopped", "enough"]
    assert first[1].startswith("stopped by Stop on rank 1")
    assert (first[3], second[3]) == (1, 2)  # rank 1 notes its own, and that the one of rank 0 is taken


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

    first, second = launch(looking)
    assert first == second
    assert first[0]  # also where the driver has wrapped it


def test_the_end_of_an_epoch_asked_for_on_one_rank_ends_it_on_all() -> None:
    def ending() -> tuple[int, int]:
        @on(Callback.on_step_end, at=1)
        def end(run: Run) -> None:
            if rank() == 1:
                run.end_epoch("enough of it")

        run = trainer(callbacks=[end]).fit()
        return run.progress.epoch, run.progress.step

    assert launch(ending) == [(2, 5), (2, 5)]  # at the boundary after the one at which one rank requested it


def test_sigterm_on_one_rank_ends_all_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    def terminated() -> tuple[int, object, str]:
        seen: list[int] = []

        @on(Callback.on_step_start)
        def send(run: Run) -> None:
            if run.progress.step == 4 and rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        @on(Callback.on_fit_end)
        def note(run: Run) -> None:
            assert run.outcome is not None
            seen.append(run.progress.step)
            reasons.append(f"{run.outcome.kind}: {run.outcome.reason}")

        reasons: list[str] = []
        one = trainer(max_epochs=5, directory=tmp_path, callbacks=[send, note, Checkpoint("100 steps")])
        with pytest.raises(SystemExit) as end:
            one.fit()
        return seen[0], end.value.code, reasons[0]

    assert launch(terminated) == [(5, 143, "preempted: signal SIGTERM")] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()]


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


def test_a_rank_that_is_killed_or_exits_is_told_with_its_signal_or_exit_code() -> None:
    def ending() -> None:
        os.kill(os.getpid(), signal.SIGKILL) if rank() == 0 else os._exit(3)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(ending)
    assert {str(error) for error in caught.value.exceptions} == {
        "rank 0 ended without a result: signal SIGKILL", "rank 1 ended without a result: exit code 3",
    }  # fmt: skip


def test_what_is_left_when_a_rank_ends_without_a_word_is_told_by_the_others() -> None:
    def dying() -> None:
        @on(Callback.on_batch_start)
        def die(run: Run, batch: Batch) -> None:
            if run.progress.step == 2 and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer(callbacks=[die]).fit()

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(dying)
    (told,) = [str(error) for error in caught.value.exceptions if isinstance(error, DistributedError)]
    assert told.startswith(
        "rank 0 ends because another process ended. rank 1 ended without an error message (killed, or crashed)"
    )


class Half(nn.Module):
    """A model with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


def test_a_rank_that_waits_too_long_says_so_also_after_a_run_that_failed_for_an_unused_parameter(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"

    def failing() -> list[str]:
        @on(Callback.on_step_end, at=1)
        def late(run: Run) -> None:
            if run.is_main:
                until(given_up.exists)

        with pytest.raises(RuntimeError, match="finished reduction in the prior iteration") as unused:
            trainer(model=Half(), driver=DdpDriver(timeout_s=4)).fit()  # the limit of the process group, so of both runs
        with pytest.raises((RuntimeError, DistributedError)) as waited:
            trainer(callbacks=[late], driver=DdpDriver(timeout_s=4)).fit()
        given_up.touch()
        return [*unused.value.__notes__, str(waited.value)]

    notes = launch(failing)
    assert all("pass driver=DdpDriver(find_unused_parameters=True)" in own[0] for own in notes)
    assert "rank 1 waited too long for another process. rank 0 did not reach step 2 within 4 s; last seen at" in notes[1][-1]


def test_the_main_process_alone_writes_and_others_know_where(tmp_path: Path) -> None:
    def writing() -> tuple[Path | None, int]:
        run = trainer(directory=tmp_path, callbacks=[LogTraining("1 step", throughput=False), JsonLines("train.jsonl")]).fit()
        return run.info.directory, len(run.history["train/loss"])

    assert launch(writing) == [(tmp_path, 6)] * 2
    for name in ("metrics.jsonl", "train.jsonl"):
        assert len((tmp_path / name).read_text().splitlines()) == 6


def test_a_directory_that_cannot_be_used_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def writing() -> str:
        with pytest.raises(Exception, match="cannot be written") as caught:
            trainer(directory=tmp_path / "file").fit()
        return type(caught.value).__name__

    assert launch(writing) == ["DirectoryError", "DistributedError"]


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

    first, second = launch(timed)
    assert first == second
    assert len(first) == 1


def test_ranks_that_were_given_different_things_are_told_all_differences() -> None:
    def differing() -> str:
        model = network() if rank() == 0 else nn.Sequential(nn.Linear(3, 1))
        with pytest.raises(DistributedError) as caught:
            trainer(model=model, seed=rank()).fit()
        return str(caught.value)

    for told in launch(differing):
        assert "seed is 1 on rank 1 and 0 on rank 0" in told
        assert "the shape of 0.weight is (1, 3) on rank 1 and (8, 3) on rank 0" in told


def test_all_that_differs_is_told_at_once_on_all_ranks() -> None:
    def differing() -> str:
        model = network()
        if rank() == 1:
            model[0].requires_grad_(False)
            model[3].double()
        other: dict[str, Any] = {"accumulate": 2, "max_epochs": 3, "callbacks": [LogTraining()]} if rank() == 1 else {}
        with pytest.raises(DistributedError) as caught:
            trainer(loader(20 if rank() == 1 else 24), model=model, **other).fit()
        return str(caught.value)

    first, second = launch(differing)
    assert first == second
    for difference in (
        "callbacks is ['LogTraining'] on rank 1 and [] on rank 0",
        "max_epochs is 3 on rank 1 and 2 on rank 0",
        "accumulate is 2 on rank 1 and 1 on rank 0",
        "the number of batches is 5 on rank 1 and 6 on rank 0",
        "the number of parameters that require a gradient is 2 on rank 1 and 4 on rank 0",
        "whether 0.bias requires a gradient is False on rank 1 and True on rank 0",
        "the type of 3.weight is 'torch.float64' on rank 1 and 'torch.float32' on rank 0",
    ):
        assert difference in first


def test_optimizers_that_differ_are_told_with_their_settings() -> None:
    def differing() -> str:
        rate = 0.1 * (1 + (rank() or 0))
        with pytest.raises(DistributedError) as caught:
            trainer(optimizer=lambda parameters: torch.optim.SGD(parameters, rate)).fit()
        with pytest.raises(DistributedError, match="'name': 'Adam'"):
            trainer(optimizer=(torch.optim.SGD, torch.optim.Adam)[rank() or 0]).fit()
        return str(caught.value)

    for told in launch(differing):
        assert "the list of optimizers is [{'name': 'SGD', 'lr': 0.2," in told


def test_a_loader_shorter_than_the_number_of_ranks_is_an_error() -> None:
    def short() -> str:
        with pytest.raises(DataError, match="the training loader has 1 batch for 2 ranks") as caught:
            trainer(loader(4)).fit()
        with pytest.raises(DataError, match="the loader of 'eval' has 1 batch for 2 ranks"):
            trainer().evaluate(loader(4))
        return str(caught.value)

    launch(short)


def test_a_master_that_is_not_there_is_an_error_in_bounded_time() -> None:
    def alone() -> None:
        os.environ |= {"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False", "RANK": "1"}
        with pytest.raises(DistributedError, match=r"rank 1 of 2 could not reach the other ranks at 127.0.0.1:1 within 1 s: "):
            DdpDriver("cpu", timeout_s=1)

    launch(alone, 2)


def test_others_that_never_come_are_an_error_in_bounded_time() -> None:
    def waiting() -> None:
        if rank() == 0:
            with pytest.raises(DistributedError, match=r"rank 0 of 2 could not reach the other ranks at .* within 1 s: "):
                DdpDriver("cpu", timeout_s=1)

    launch(waiting)


def test_a_driver_for_one_process_is_refused_in_each_of_several() -> None:
    def alone() -> str:
        with pytest.raises(ValueError, match="Use driver='auto', 'ddp' or 'fsdp', or start it without") as caught:
            Trainer(network(), torch.optim.SGD, loader(), squared_error, max_epochs=1, driver="single")
        return str(caught.value)

    for told in launch(alone):
        assert told.startswith("driver='single' is for one process, and this one was started as one of WORLD_SIZE=2")


def test_one_process_is_refused_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"driver='single' is for one process, .* Use driver='auto', 'ddp' or 'fsdp'"):
        driver_of("single", "cpu")


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


def test_all_ranks_continue_to_the_same_bits(tmp_path: Path) -> None:
    def run_in(name: str, steps: int) -> Tensor:
        rows = loader(26, num_workers=0)
        one = trainer(rows, model=network(dropout=0.3), directory=tmp_path / name, max_steps=steps, max_epochs=None,
                      callbacks=[Checkpoint("1 step")])  # fmt: skip
        one.fit(resume="auto")
        return weights_of(one)

    def both() -> tuple[Tensor, Tensor, Any]:
        whole = run_in("whole", 7)
        run_in("cut", 5)
        torch.manual_seed(99)
        return whole, run_in("cut", 7), torch.rand(3)

    for whole, continued, _ in launch(both):
        assert torch.equal(whole, continued)


@pytest.mark.parametrize("judge", ["evaluate", "predict"])
def test_an_error_of_one_rank_in_an_evaluation_is_told_to_the_others(judge: str) -> None:
    def failing() -> None:
        def compute(model: nn.Module, batch: Batch) -> Tensor:
            if rank() == 1:
                raise ZeroDivisionError("on purpose")
            return squared_error(model, batch)

        one = trainer(driver=FsdpDriver("cpu", timeout_s=100))
        getattr(one, judge)(loader(24), compute=compute)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(failing)
    first, second = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    where = "predict" if judge == "predict" else "evaluation 'eval'"
    assert first.__notes__[0].startswith(f"context: compute, in batch 1 of {where}, on rank 1")
    assert isinstance(second, DistributedError)
    assert "rank 1: ZeroDivisionError: on purpose" in str(second)
