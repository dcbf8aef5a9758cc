"""Ranks agree: requests of one rank are taken on all at the same step, and differences and errors of one end all."""

from __future__ import annotations

import inspect
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.drivers import DdpDriver, Driver, driver_of, rendezvous
from cadenza.drivers.rendezvous import rendezvous_of
from cadenza.drivers.sharding import local
from cadenza.engine import rank_sync
from cadenza.engine.session import session_of
from cadenza.errors import DataError, DistributedError
from cadenza.testing import launch
from tests.distributed.drivers import blocks, ddp, fsdp, sharded
from tests.distributed.parts import Batch, loader, network, samples, squared_error, trainer, weights_of
from tests.distributed.parts import own_rank as rank
from tests.distributed.standing import on_ranks

Listens = Callable[[Any], Callback]
STOPS: dict[
    str, tuple[Listens, int, int, int]
] = {  # when a rank asks, the steps that are complete then, it, and where all stop
    "in a step": (on(Callback.on_step_end), 3, 1, 4),
    "in the last step of an epoch": (on(Callback.on_step_end), 6, 1, 6),
    "before a batch": (on(Callback.on_batch_start, at=3), 2, 1, 3),
    "at the start of a run": (on(Callback.on_fit_start), 0, 1, 0),
    "at the start of an epoch": (on(Callback.on_epoch_start), 0, 1, 0),
    "at the end of an epoch": (on(Callback.on_epoch_end), 6, 1, 6),
    "main process, after a record": (on(Callback.on_log), 1, 0, 2),  # sent with the next step
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_that_one_rank_asks_for_is_taken_on_all_at_the_same_step(name: str) -> None:
    listens, at, asking, expected = STOPS[name]

    def stopping() -> tuple[int, str, list[str]]:
        heard: list[str] = []

        @listens
        def stop(run: Run, *_: Any) -> None:
            if rank() == asking and run.progress.step == at:
                run.stop("enough")

        hear = on(Callback.on_stop)(lambda run, reason: heard.append(reason))
        logs = [on(Callback.on_step_end)(lambda run: run.log("a", 1.0))] if "record" in name else []
        run = trainer(loader(48), max_epochs=5, callbacks=[stop, hear, *logs]).fit()
        assert run.outcome is not None
        return run.progress.step, run.why("stopped"), [run.outcome.kind, run.outcome.reason, *heard]

    ranks = on_ranks(stopping)
    for step, _, told in ranks:
        assert step == expected
        assert told == ["stopped", "enough", "enough"]
    assert ranks[1 - asking][1].startswith(f"stopped by stop on rank {asking}")


SAVES: dict[str, tuple[Listens, int, int]] = {  # when a rank asks, the steps that are complete then, and where all save
    "in a step": (on(Callback.on_step_end), 3, 4),
    "in the last step of an epoch": (on(Callback.on_step_end), 6, 6),
    "in a batch": (on(Callback.on_batch_end), 2, 4),
    "at the start of a run": (on(Callback.on_fit_start), 0, 1),
    "at the end of a run": (on(Callback.on_fit_end), 8, 8),
}


@pytest.mark.parametrize("asking", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("make", [ddp, fsdp])
@pytest.mark.parametrize("name", SAVES)
def test_a_save_that_one_rank_asks_for_is_done_by_all_at_the_same_step(
    name: str, make: Callable[[], Driver], asking: tuple[int, ...], tmp_path: Path
) -> None:
    listens, at, expected = SAVES[name]

    def saving() -> list[tuple[int, str]]:
        @listens
        def ask(run: Run, *_: Any) -> None:
            if rank() in asking and run.progress.step == at:
                run.save(f"asked by {len(asking)}")

        writes = Checkpoint("1000 steps", background=False)
        run = trainer(loader(48), max_steps=8, callbacks=[ask, writes], driver=make(), directory=tmp_path).fit()
        return [(one.data["step"], one.data["reason"]) for one in run.decisions if one.what == "saved"]

    saved, *_ = on_ranks(saving)
    all_at_once = len(asking) == 2 and name in ("in a step", "in a batch")
    wanted = expected - all_at_once
    assert [step for step, reason in saved if reason == f"asked by {len(asking)}" or step == 8] == sorted({wanted, 8})
    assert saved[-1][0] == 8


def test_saves_that_ranks_ask_for_at_different_steps_are_all_done(tmp_path: Path) -> None:
    def saving() -> tuple[list[int], list[float]]:
        @on(Callback.on_step_end)
        def ask(run: Run) -> None:
            if run.progress.step in ((2, 5) if rank() else (3, 5)):
                run.save(f"by rank {rank()}")

        writes = Checkpoint("1000 steps", background=False)
        one = trainer(loader(48), max_steps=8, callbacks=[ask, writes], directory=tmp_path)
        decisions = one.fit().decisions
        return [decision.data["step"] for decision in decisions if decision.what == "saved"], weights_of(one).tolist()

    (first, weights), (_, same) = on_ranks(saving)
    assert first == [3, 5, 8]
    assert weights == same


WITH_OTHERS: dict[str, tuple[Listens, int, str, list[Callable[[], Callback]]]] = {
    # when a rank asks, the steps that are complete then, the schedule of checkpoints, and other callbacks
    "a step after a checkpoint, at the end of an epoch": (on(Callback.on_step_end), 6, "5 steps", []),
    "a step after a checkpoint, with a record": (on(Callback.on_step_end), 3, "2 steps", [partial(LogTraining, "1 step")]),
}


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("name", WITH_OTHERS)
def test_a_save_of_one_rank_follows_what_all_ranks_do_at_a_step_boundary(name: str, asking: int, tmp_path: Path) -> None:
    """At the boundary after a save, all ranks compare their weights: a request of one rank must not come before it there."""
    listens, at, every, others = WITH_OTHERS[name]

    def saving() -> list[int]:
        @listens
        def ask(run: Run, *_: Any) -> None:
            if rank() == asking and run.progress.step == at:
                run.save("asked")

        callbacks = [Checkpoint(every, background=False), ask, *(make() for make in others)]
        run = trainer(loader(48), max_steps=8, callbacks=callbacks, driver=ddp(), directory=tmp_path).fit()
        return [decision.data["step"] for decision in run.decisions if decision.what == "saved"]

    saved, _ = on_ranks(saving)
    assert at in saved or at + 1 in saved  # at this boundary, or at the next if the other rank did not expect a request


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("hook", ["on_batch_end", "on_step_end", "on_epoch_start", "on_epoch_end", "on_fit_end"])
def test_a_rank_may_ask_for_a_save_each_time_that_a_hook_is_called(hook: str, asking: int, tmp_path: Path) -> None:
    def saving() -> tuple[str, int]:
        @on(getattr(Callback, hook))
        def ask(run: Run, *_: Any) -> None:
            if rank() == asking:
                run.save("asked")

        callbacks = [Checkpoint("7 steps"), ask]
        run = trainer(loader(48), max_epochs=2, callbacks=callbacks, driver=ddp(), directory=tmp_path).fit()
        assert run.outcome is not None
        return run.outcome.kind, run.progress.step

    assert on_ranks(saving) == [("finished", 12)] * 2


def test_a_stop_that_all_ranks_ask_for_is_taken_at_once() -> None:
    def stopping() -> tuple[int, str, int]:
        @on(Callback.on_step_end)
        def stop(run: Run) -> None:
            if run.progress.step == 3:
                run.stop("enough")

        run = trainer(loader(48), callbacks=[stop]).fit()
        return run.progress.step, run.why("stopped"), sum(decision.what == "stopped" for decision in run.decisions)

    (first, why, noted), (second, _, also) = on_ranks(stopping)
    assert first == second == 3
    assert why == "stopped by stop at epoch 1, step 3, batch 3: enough"
    assert (noted, also) == (1, 2)  # rank 1 notes its own, and that the one of rank 0 is taken


def test_the_end_of_an_epoch_that_one_rank_asks_for_ends_it_on_all() -> None:
    def ending() -> tuple[int, int]:
        @on(Callback.on_step_end, at=1)
        def end(run: Run) -> None:
            if rank() == 1:
                run.end_epoch("enough of it")

        run = trainer(callbacks=[end]).fit()
        return run.progress.epoch, run.progress.step

    assert on_ranks(ending) == [(2, 5), (2, 5)]  # at the boundary after the one at which one rank requested it


def test_an_unexpected_stop_is_sent_with_the_next_batch() -> None:
    def stopping() -> tuple[int, str]:
        rank_sync.LONGEST_S = 0.0  # in this process: no quiet steps, at the end of which the request would be sent
        runs: list[Run] = []
        keep = on(Callback.on_fit_start)(lambda run: runs.append(run))

        def loss(model: Any, batch: Any) -> Tensor:
            if rank() == 1 and runs[0].progress.step == 2:
                runs[0].stop("asked for in the loss")
            return squared_error(model, batch)

        run = trainer(loader(48), compute_loss=loss, callbacks=[keep]).fit()
        return run.progress.step, run.why("stopped")

    (first, why), (second, _) = launch(stopping)
    assert first == second == 4
    assert why.startswith("stopped by the script on rank 1")


def test_a_signal_in_quiet_steps_stops_all_ranks_at_the_same_step() -> None:
    def stopping() -> tuple[int, str]:
        asked: list[Run] = []

        class Keep(Callback):
            def on_fit_start(self, run: Run) -> None:
                asked.append(run)

        def ask(model: nn.Module, batch: Any) -> Tensor:
            if rank() == 1 and asked[0].progress.step == 20:
                session_of(asked[0]).sync.requests.preempt(signal.SIGTERM)
            return squared_error(model, batch)

        one = trainer(loader(480), max_epochs=50, compute_loss=ask, callbacks=[Keep()])
        with pytest.raises(SystemExit):
            one.fit()
        return asked[0].progress.step, asked[0].why("stopped")

    first, second = launch(stopping)
    assert first[0] == second[0]
    assert 21 <= first[0] < 20 + 140
    assert "SIGTERM" in first[1]


def test_elapsed_time_is_the_mean_over_ranks() -> None:
    def passed() -> float:
        @on(Callback.on_fit_start)
        def set_back(run: Run) -> None:
            run.progress._began -= 10_000 * rank()

        return trainer(loader(48), callbacks=[set_back]).fit().progress.elapsed_s

    first, second = on_ranks(passed)
    assert first == second
    assert 5_000 < first < 5_100


def test_a_step_fn_may_ask_at_any_time() -> None:
    def stepping() -> int:
        def step(run: Run, batch: Any) -> Tensor:
            loss = torch.nn.functional.mse_loss(run.model(batch[0]), batch[1])
            run.backward(loss)
            run.update()
            if rank() == 1 and run.progress.step == 2:
                run.stop("enough")
            return loss

        return trainer(loader(48), compute_loss=None, step_fn=step).fit().progress.step

    assert on_ranks(stepping) == [4, 4]  # the request of one rank takes effect at the next boundary, on all


def test_a_callback_that_is_disabled_on_one_rank_does_not_separate_the_ranks() -> None:
    def training() -> tuple[int, list[tuple[int, float]]]:
        class Fragile(Callback):
            on_fault = "disable"

            def on_batch_start(self, run: Run, batch: Any) -> None:
                if rank() == 1 and run.progress.step == 3:
                    raise ValueError("fails on one rank")

        logging = on(Callback.on_step_end, every=3)(lambda run: run.log("at", run.progress.step))
        run = trainer(loader(48, shuffle=False), max_epochs=1, callbacks=[Fragile(), logging]).fit()
        return run.progress.step, run.history["at"]

    first, second = on_ranks(training)
    assert first == second == (6, [(3, 3.0), (6, 6.0)])


# -- differences and errors


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


def test_all_that_differs_is_told_at_once_on_all_ranks() -> None:
    def told(**arguments: Any) -> str:
        with pytest.raises(DistributedError) as caught:
            trainer(**arguments).fit()
        return str(caught.value)

    def differing() -> list[str]:
        model, rate = network(), 0.1 * (1 + rank())
        other: dict[str, Any] = {}
        if rank() == 1:
            model[0].requires_grad_(False)
            model[3].double()
            other = {"accumulate": 2, "max_epochs": 3, "callbacks": [LogTraining()]}
        return [
            told(model=model, data=loader(20 if rank() == 1 else 24), **other),
            told(model=nn.Sequential(nn.Linear(3, 1)) if rank() == 1 else None, seed=rank()),
            told(optimizer=lambda parameters: torch.optim.SGD(parameters, rate)),
            told(optimizer=(torch.optim.SGD, torch.optim.Adam)[rank()]),
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


def test_what_cannot_work_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong: dict[str, Callable[[], object]] = {
        "cannot be written": lambda: trainer(directory=tmp_path / "file").fit(),
        "the training loader has 1 batch for 2 ranks": lambda: trainer(loader(4)).fit(),
        "^driver='single' is for one process, and this one was started as one of WORLD_SIZE=2.*"
        "Use driver='auto', 'ddp' or 'fsdp', or start it without": lambda: trainer(driver="single"),
    }

    def errors() -> list[str]:
        kinds = []
        for text, act in wrong.items():
            with pytest.raises(Exception, match=text) as caught:
                act()
            kinds.append(type(caught.value).__name__)
        return kinds

    main, other = on_ranks(errors)
    assert main == ["DirectoryError", "DataError", "ValueError"]
    assert other == ["DistributedError", *main[1:]]


@pytest.mark.parametrize(("length", "message"), [(7, "returned only 6"), (5, "returned more")])
def test_a_sharded_loader_with_a_wrong_length_is_an_error_on_all_ranks(length: int, message: str) -> None:
    class Wrong(DistributedSampler[Any]):
        def __len__(self) -> int:
            return 4 * length

    def training() -> str:
        data = samples(48)
        with pytest.raises((DataError, DistributedError)) as raised:
            trainer(DataLoader(data, 4, sampler=Wrong(data, 2, rank(), shuffle=False)), max_epochs=1).fit()
        return str(raised.value)

    assert all(message in told for told in launch(training))


def test_a_rank_that_cannot_reach_the_others_says_so_in_bounded_time() -> None:
    def alone() -> None:
        said = r"rank 0 of 2 could not reach the other ranks at .* within 1 s: 0 of 1 other processes arrived\. Check that"
        if rank() == 1:  # for which there is no master, and for which rank 0 waits
            os.environ |= {"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
            said = r"rank 1 of 2 could not reach the other ranks at 127.0.0.1:1 within 1 s: "
        with pytest.raises(DistributedError, match=said):
            DdpDriver("cpu", timeout_s=1)

    launch(alone)


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


@pytest.mark.parametrize(("backend", "limit_s"), [("gloo", 20), ("cpu:gloo,cuda:nccl", 80)])
def test_nccl_waits_longer_than_the_exchange_that_names_a_late_rank(
    backend: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rendezvous.join(rendezvous.Rendezvous(0, 0, 1, "127.0.0.1", port, False), backend, timeout_s=20)
    assert given["timeout"].total_seconds() == limit_s


def test_nccl_connects_at_the_start_and_its_records_lie_in_the_directory_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at = rendezvous.Rendezvous(0, 0, 1, "127.0.0.1", port, False)
    rendezvous.join(at, "cpu:gloo,cuda:nccl", timeout_s=20, device=torch.device("cuda", 0))
    assert given["device_id"] == torch.device("cuda", 0)

    def dumped() -> list[str | None]:
        driver = ddp()
        driver.device = torch.device("cuda", 0)  # as with NCCL
        os.environ.pop("TORCH_FR_DUMP_TEMP_FILE", None)
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = "mine"
        driver.keep_dumps(tmp_path)
        return [os.environ.get(name) for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")]

    assert on_ranks(dumped) == [[str(tmp_path / "nccl-trace.rank"), "mine"]] * 2


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


# -- weights and rates that one rank has changed alone


DIGESTS: dict[str, tuple[Callable[[], Driver], int]] = {
    "ddp": (ddp, 2),
    "ddp-3": (ddp, 3),
    "fsdp": (sharded, 2),
    "hsdp": (partial(sharded, replicas=2), 4),
}


def differences(make: Callable[[], Driver], directory: Path, change: Callable[[Run], object]) -> list[Any]:
    """Change something on rank 1 after step 3; return what the ranks find at the saves."""
    alone = on(Callback.on_step_end, at=3)(lambda run: change(run) if rank() == 1 else None)
    callbacks = [alone, Checkpoint("2 steps")]
    run = trainer(loader(48), callbacks=callbacks, driver=make(), max_steps=6, directory=directory, model=blocks()).fit()
    return [(one.data["step"], one.why, one.data["names"]) for one in run.decisions if one.what == "ranks differ"]


def change_rate(run: Run) -> None:
    run.optimizers[0].param_groups[0]["lr"] *= 2


def change_weight(run: Run) -> None:
    model: Any = run.model
    with torch.no_grad():
        local(model[2].inner.weight).mul_(1.001)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_rate_that_one_rank_changes_is_found_at_the_next_save(name: str, tmp_path: Path) -> None:
    make, ranks = DIGESTS[name]
    for found in on_ranks(partial(differences, make, tmp_path, change_rate), ranks):
        step, why, names = found[0]
        assert step == 4
        assert why == "at the save of step 4, the learning rate of group 0 differs between rank 0 and rank 1"
        assert names[0] == "the learning rate of group 0"


@pytest.mark.parametrize(("name", "first", "other"), [("ddp", 0, 1), ("ddp-3", 0, 1), ("hsdp", 1, 3)])
def test_a_weight_that_one_rank_changes_is_found_at_the_next_save(name: str, first: int, other: int, tmp_path: Path) -> None:
    make, ranks = DIGESTS[name]
    for found in on_ranks(partial(differences, make, tmp_path, change_weight), ranks):
        step, why, names = found[0]
        assert step == 4
        assert why == f"at the save of step 4, 2.inner.weight differs between rank {first} and rank {other}"
        assert "2.inner.weight" in names


@pytest.mark.parametrize("name", DIGESTS)
def test_equal_ranks_find_no_difference(name: str, tmp_path: Path) -> None:
    make, ranks = DIGESTS[name]
    assert on_ranks(partial(differences, make, tmp_path, lambda run: None), ranks) == [[]] * ranks


def test_a_driver_that_averages_weights_now_and_then_may_have_others_in_between(tmp_path: Path) -> None:
    class Local(DdpDriver):
        def after_update(self, model: nn.Module, step: int) -> None:
            """Average at another time."""

    found = on_ranks(partial(differences, partial(Local, "cpu", timeout_s=100), tmp_path, change_weight))
    assert found == [[], []]
